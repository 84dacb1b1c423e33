"""Products of rows that are sorted by expert with each expert's matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def grouped_product(rows: Tensor, weights: Tensor, ends: Sequence[int]) -> Tensor:
    """rows [R, n], sorted by expert; weights [E, n, m]; ends: the end of each expert's rows. Returns [R, m]."""
    out = rows.new_empty(len(rows), weights.shape[2])
    start = 0
    for weight, end in zip(weights, ends, strict=True):
        if end > start:
            torch.mm(rows[start:end], weight, out=out[start:end])
        start = end
    return out
