"""Block sizes of operations with large transients. Free of torch: the prediction of memory uses them, too.

Small tensors are processed whole, large ones in at most 64 blocks, whose transients stay far below the tensor's size.
"""

from __future__ import annotations

from shardwise.model.chunking import PIECES


def loss_chunk(logits: int) -> int:
    """Logits per block that the cross-entropy converts to fp32 probabilities, of `logits` in all."""
    return max(1 << 18, logits // PIECES)


def optimizer_chunk(elements: int) -> int:
    """Elements per block that the optimizer converts and updates, of `elements` in all, where gradients or weights are
    not in the precision of the masters."""
    return max(1 << 17, elements // PIECES)


def sum_chunk(elements: int) -> int:
    """Elements per block of a sum in another precision than their own, of `elements` in all."""
    return min(elements, max(1 << 17, elements // PIECES))


QUERY_ROWS = 128
"""Queries per block of scores in attention without a fused kernel."""

SCORES = 1 << 22
"""Scores that attention over a cache holds at a time, where no fused kernel computes them."""

WIDE_OUTPUTS = 8192
"""Rows of an 8-bit matrix per block that is converted to 16 or 32 bits."""

DENSE = 1 << 24
"""Elements of a frozen 8-bit matrix that a training step converts at a time."""


def dense_rows(outputs: int, inputs: int) -> int:
    """Rows of a frozen 8-bit matrix [outputs, inputs] per block that is converted."""
    return max(1, min(outputs, DENSE // inputs))


def row_int8_bytes(outputs: int, inputs: int, *, width: int) -> int:
    """Bytes of an 8-bit matrix: a byte per number and for each row a scale of `width` bytes."""
    return outputs * (inputs + width)
