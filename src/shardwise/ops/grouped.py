"""Products of rows that are sorted by expert with each expert's matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [R, n], sorted by expert; weights [E, n, m]; ends: the end of each expert's rows, on the host, int64 [E].
    Returns [R, m]."""
    out = rows.new_empty(len(rows), weights.shape[2])
    start = 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        if end > start:
            torch.mm(rows[start:end], weight, out=out[start:end])
        start = end
    return out
