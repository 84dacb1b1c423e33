"""The core of attention as the decoder has it, with the settings of a run."""

from __future__ import annotations

from shardwise.decoder.attention import CoreAttention
from shardwise.ops.context import Core, OpContext


def core_attention(core: CoreAttention, at: OpContext) -> None:
    """The decoder's own core: of the layout's kind, on the heads that are here."""
    core.kind, core.first_head = at.options.attention, at.first_head


def core_across_ranks(core: CoreAttention, at: OpContext) -> Core:
    """The core over sequences that are cut over ranks."""
    assert at.across_ranks is not None
    return at.across_ranks(core)
