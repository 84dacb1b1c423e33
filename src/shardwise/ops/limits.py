"""Elements that memory-hungry operations work on at a time. Without torch: the prediction of memory asks, too.

Small tensors are taken whole; large ones in at most 64 pieces, whose transients then stay far below the tensor itself.
"""

from __future__ import annotations

from shardwise.model.chunking import PIECES


def loss_chunk(logits: int) -> int:
    """Logits that the cross-entropy turns into wide probabilities at a time, from so many."""
    return max(1 << 18, logits // PIECES)


def optimizer_chunk(elements: int) -> int:
    """Of so many elements of an interval, those that the optimizer converts and updates at a time, where gradients or
    weights are not in the precision of the masters."""
    return max(1 << 17, elements // PIECES)


def sum_chunk(elements: int) -> int:
    """Elements added up at a time in another precision than their own, from so many."""
    return min(elements, max(1 << 17, elements // PIECES))


QUERY_ROWS = 128
"""Queries of a sequence whose scores attention without a fused kernel holds at a time."""

WIDE_OUTPUTS = 8192
"""Rows of an 8-bit matrix that are turned back to 16 or 32 bits at a time."""


def row_int8_bytes(outputs: int, inputs: int, *, width: int) -> int:
    """Bytes of an 8-bit matrix: a byte per number and for each row a scale of `width` bytes."""
    return outputs * (inputs + width)
