"""Norms of queries and keys with one mean square over all heads, which are split over tensor-parallel ranks.

All ranks have equally many heads, so the mean over all heads is the mean of the ranks' means, also where key heads are
on several ranks. Both passes sum two numbers per token over the ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.decoder.modules import JointNorm, RMSNorm, norm_scale
from shardwise.ops.context import OpContext, Redistribute

Pair = tuple[Tensor, Tensor]


class _JointNorm(torch.autograd.Function):
    """Saves queries, keys, and 1 / rms of both."""

    @staticmethod
    def forward(ctx: Any, ranks: int, sums: Redistribute, norm: RMSNorm, *tensors: Tensor) -> Pair:
        x, weights = tensors[:2], tensors[2:]
        wide = [(each.float() if each.dtype == torch.bfloat16 else each) for each in x]
        squares = [torch.linalg.vector_norm(each, dim=-1).square_().div_(ranks * each.shape[-1]) for each in wide]
        rstd = sums.forward(torch.stack(squares, -1)).add_(norm.eps).rsqrt_()
        ctx.ranks, ctx.sums, ctx.centered = ranks, sums, norm.zero_centered
        ctx.save_for_backward(*tensors, rstd)
        q, k = (_scaled(*each, norm.zero_centered) for each in zip(x, wide, rstd.split(1, -1), weights, strict=True))
        return q, k

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *x, wq, wk, rstd = ctx.saved_tensors
        weight_grads, scaled, normed, inner = [], [], [], []
        for grad, each, weight, r in zip(grads, x, (wq, wk), rstd.split(1, -1), strict=True):
            normed.append(each * r)
            product = grad * normed[-1]
            weight_grads.append(product.flatten(0, -2).sum(0).to(weight.dtype))
            scaled.append(grad * norm_scale(weight, product.dtype, ctx.centered))
            inner.append(product.mul_(norm_scale(weight, product.dtype, ctx.centered)).sum(-1).div_(each.shape[-1]))
        means = ctx.sums.forward(torch.stack(inner, -1).div_(ctx.ranks)).split(1, -1)
        found = (
            s.addcmul_(n, mean, value=-1).mul_(r).to(each.dtype)
            for s, n, mean, r, each in zip(scaled, normed, means, rstd.split(1, -1), x, strict=True)
        )
        return None, None, None, *found, *weight_grads


def _scaled(x: Tensor, wide: Tensor, rstd: Tensor, weight: Tensor, zero_centered: bool) -> Tensor:
    if zero_centered:
        return (wide * rstd).mul_(norm_scale(weight, wide.dtype, zero_centered)).to(x.dtype)
    return (wide * rstd).to(x.dtype).mul_(weight)


def joint_norm(norm: JointNorm, at: OpContext) -> Callable[[Tensor, Tensor], Pair]:
    """The form of ranks that share the heads."""
    sums = at.arounds["statistics"].leave

    def forward(q: Tensor, k: Tensor) -> Pair:
        ranks, weights = norm.q_width // q.shape[-1], (norm.q.weight, norm.k.weight)
        normed: Pair = _JointNorm.apply(ranks, sums, norm.q, q, k, *weights)  # type: ignore[no-untyped-call]
        return normed

    return forward
