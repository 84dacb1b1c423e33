"""Bytes per token of a layer of experts: experts spread over ranks, or every expert cut over them."""

from __future__ import annotations

from shardwise.layout.legality import valid_ep, valid_tp
from shardwise.model import ModelConfig
from shardwise.predict.traffic.ring_volume import ring_share
from shardwise.report.step_report import DTYPE_BYTES

DEGREES = (2, 4, 8, 16, 32, 64)


def routed_bytes(model: ModelConfig, ep: int, dtype: str) -> float:
    """Bytes that all ranks send for a token, forward, with experts over `ep` ranks and an even load: its rows to their
    experts and back."""
    assert model.experts
    elements = 2 * model.experts.active * model.hidden
    return float(elements * ring_share("all_to_all", ep) * DTYPE_BYTES[dtype])


def summed_bytes(model: ModelConfig, tp: int, dtype: str) -> float:
    """Bytes that all ranks send for a token, forward, with every expert cut over `tp` ranks: the sum of their partial
    results."""
    return float(tp * model.hidden * ring_share("all_reduce", tp) * DTYPE_BYTES[dtype])


def compared(model: ModelConfig, dtype: str) -> list[tuple[int, float | None, float | None]]:
    """(degree, bytes of `routed_bytes`, of `summed_bytes`), with None where the model cannot be cut so."""
    return [
        (
            n,
            routed_bytes(model, n, dtype) if n in valid_ep(model, n) else None,
            summed_bytes(model, n, dtype) if n in valid_tp(model) else None,
        )
        for n in DEGREES
    ]


def example(model: ModelConfig) -> int:
    """Ranks of the example in words: at most 16, over which experts can be spread, and into which they can be cut."""
    return max(n for n in DEGREES if n <= 16 and n in valid_ep(model, n) and n in valid_tp(model))
