"""Which tokens a rank routes to experts, as a layout has it."""

from __future__ import annotations

from shardwise.layout.axes import DATA, STAGE, Axes
from shardwise.layout.layout import Layout


def gathers_sequences(layout: Layout) -> bool:
    """Whether every tensor-parallel rank routes all tokens of its group, of which each has a part of the experts'
    width."""
    return layout.expert_tp > 1


def slices_tokens(layout: Layout) -> bool:
    """Whether tensor-parallel ranks, which have the same tokens, route a part of them each."""
    return layout.tp > 1 and layout.expert_tp == 1 and not layout.sp


def load_axes(layout: Layout) -> Axes:
    """Axes along which ranks of a stage route different tokens."""
    return DATA if gathers_sequences(layout) else STAGE


def routed_tokens(layout: Layout, tokens: int, tp_rank: int = 0) -> int:
    """Rows of a micro-batch that a rank routes. tokens: those that it attends with."""
    if gathers_sequences(layout) or layout.tp == 1:
        return tokens
    each = -(-tokens // layout.tp)
    return max(0, min(each, tokens - tp_rank * each))
