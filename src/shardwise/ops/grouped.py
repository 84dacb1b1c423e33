"""Products of rows that are sorted by expert with each expert's matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

KERNEL = getattr(F, "grouped_mm", None)
"""torch's grouped product; None in versions without one."""

ALIGNED = 8
"""Elements of 16 bits to whose multiples torch's grouped kernel wants rows to be aligned."""


def grouped_product(rows: Tensor, weights: Tensor, ends: Sequence[int]) -> Tensor:
    """rows [R, n], sorted by expert; weights [E, n, m]; ends: the end of each expert's rows. Returns [R, m]."""
    return one_kernel(rows, weights, ends) if has_kernel(rows, weights) else one_by_one(rows, weights, ends)


def has_kernel(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch's grouped kernel is the better choice: on CUDA for bf16. On CPUs it gains little, and it has no
    float64."""
    aligned = not any(size % ALIGNED for size in weights.shape[1:])
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and KERNEL is not None


def one_kernel(rows: Tensor, weights: Tensor, ends: Sequence[int]) -> Tensor:
    """All products in one call."""
    assert KERNEL is not None
    out: Tensor = KERNEL(rows, weights, offs=torch.tensor(ends, dtype=torch.int32, device=rows.device))
    return out


def one_by_one(rows: Tensor, weights: Tensor, ends: Sequence[int]) -> Tensor:
    """A product for each expert that has rows."""
    out = rows.new_empty(len(rows), weights.shape[2])
    start = 0
    for weight, end in zip(weights, ends, strict=True):
        if end > start:
            torch.mm(rows[start:end], weight, out=out[start:end])
        start = end
    return out
