"""Rotary embedding in three kernels and five passes over memory: a product, and one addition for each half.

The decoder's own copies, rolls, multiplies and adds, in nine passes. Rounds as that does. Saves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.decoder.attention import Rope
from shardwise.ops.context import OpContext
from shardwise.ops.llama_halves import Tables


def rotate_into(out: Tensor, x: Tensor, tables: Tables, back: bool = False) -> None:
    """Write x with pairs (i, i + D/2) rotated, or rotated back, to `out`. x, out: [B, S, H, D], of distinct memory."""
    cos, sin = tables
    half, sign = cos.shape[-1] // 2, -1 if back else 1
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)


def _rotated(x: Tensor, tables: Tables, first: int, back: bool) -> Tensor:
    width = tables[0].shape[-1]
    out = torch.empty_like(x)
    if width < x.shape[-1]:
        out.copy_(x)
    part = slice(first, first + width)
    rotate_into(out[..., part], x[..., part], tables, back)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, first: int) -> Tensor:
        ctx.tables, ctx.first = (cos, sin), first
        return _rotated(x, ctx.tables, first, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _rotated(grads[0], ctx.tables, ctx.first, back=True), None, None, None


def rotary(rope: Rope, at: OpContext) -> Callable[..., Tensor]:
    """A rotated copy of the numbers from `first` on."""

    def forward(x: Tensor, tables: Tables, first: int = 0) -> Tensor:
        out: Tensor = _Rotate.apply(x, *tables, first)  # type: ignore[no-untyped-call]
        return out

    return forward
