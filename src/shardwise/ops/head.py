"""The output head of training, whose logits the loss caps where that overwrites them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shardwise.decoder import Batch
from shardwise.decoder.decoder import Head
from shardwise.ops.context import OpContext


def uncapped_head(head: Head, at: OpContext) -> Callable[[Tensor, Batch], Tensor] | None:
    """Logits before their soft cap."""
    return (lambda x, batch: head.uncapped(x)) if head.softcap else None
