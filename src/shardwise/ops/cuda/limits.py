"""Sizes at which the CUDA forms work piece by piece. Without torch: the prediction of memory asks, too."""

from __future__ import annotations

LOSS_BYTES = 1 << 28
"""Bytes of fp32 or fp64 logits that the loss holds at a time. Each row is a thread block: 523 rows of 128,256 columns
fill an H100 four times."""


def loss_rows(rows: int, columns: int, width: int) -> int:
    """Rows of logits per block of the loss, of `rows` in all. width: bytes of a logit in the precision of the sums."""
    return max(1, min(rows, LOSS_BYTES // (columns * width)))
