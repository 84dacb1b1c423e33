"""The core of attention as the decoder has it, with the settings of a run."""

from __future__ import annotations

from shardwise.decoder.attention import CoreAttention
from shardwise.ops.context import OpContext


def core_attention(core: CoreAttention, at: OpContext) -> None:
    """The decoder's own core: of the layout's kind, on the heads that are here."""
    core.kind, core.first_head = at.options.attention, at.first_head
