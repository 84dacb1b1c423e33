"""FSDP's strategies as stages of ZeRO."""

from __future__ import annotations

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def strategy_of(word: str, reshard: str) -> str:
    """FSDP1's strategy: of either key, by name or number."""
    if reshard.upper() in _STRATEGIES:
        return reshard.upper()
    return _STRATEGIES[int(word) - 1] if word.isdigit() else word.upper()


def stage_of(version: int, strategy: str, reshard: str, processes: int, machines: int) -> int:
    """Stage of ZeRO; groups of one rank shard nothing."""
    if version >= 2:
        return 2 if reshard.lower() == "false" else 3
    if strategy.startswith("HYBRID") and 1 < machines >= processes:
        return 0
    return {"SHARD_GRAD_OP": 2, "HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0}.get(strategy, 3)
