"""What servers share."""

from collections.abc import Mapping

from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.layout.experts import expert_spread, experts_across
from shardwise.model import ModelConfig
from shardwise.model.formats import weight_format


def is_format(weights: str) -> bool:
    """Whether a type of weights is one, and not a method whose files say it."""
    try:
        return bool(weight_format(weights))
    except UserError:
        return False


def quantization(engine: str, words: Mapping[str, str], weights: str) -> str | None:
    """The engine's word for a type of stored weights; None for 16 and 32 bits. words: word -> type that it stores.
    Raises `UserError` without one."""
    stored = weight_format(weights)
    if not stored.lossy:
        return None
    for word, meaning in words.items():
        # vLLM reads integers of 8 bits from files alone.
        if weight_format(meaning).form == stored.form and (engine, word) != ("vllm", "w8a8_int8"):
            return word
    raise UserError(f"no quantization of {engine} stores {weights}")


def shared_experts(layout: Layout) -> bool:
    """Whether replicas of attention are inside one engine."""
    return experts_across(layout) > 1


def redundant_experts(layout: Layout, model: ModelConfig) -> int | None:
    """Copies of experts that fill up ranks; None without."""
    return (expert_spread(layout, model.experts.count).redundant if model.experts else 0) or None
