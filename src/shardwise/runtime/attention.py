"""Fused attention on a CPU with a backward of its own for short sequences: few large products in place of many small.

torch's fused kernel works on small tiles where a sequence is short, and its backward on those that bf16 is slow on:
batched products over all heads of a sequence take less time up to `LONGEST_SHORT` tokens (docs/performance.md). The
forward is torch's, and what is saved as well: queries, keys, values, the output and its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.decoder import Batch, Decoder
from shardwise.decoder.attention import CoreAttention
from shardwise.decoder.modules import swap_forward
from shardwise.model.chunking import ATTENTION_ROWS, LONGEST_SHORT, SHORTEST


class _ShortAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(D)) v, causal. q: [B, S, H, D]; k, v: [B, S, K, D] with K dividing H; returns q's shape."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = fused(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, True)
        out = out.transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, sums = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for i in range(len(q)):
            given = [x[i].transpose(0, 1) for x in (q, k, v, out, grads[0])]
            _one_sequence(given, sums[i], [x[i].transpose(0, 1) for x in (dq, dk, dv)])
        return dq, dk, dv


def _one_sequence(given: list[Tensor], sums: Tensor, into: list[Tensor]) -> None:
    """The gradients of one sequence. given: q, k, v, output and its gradient; sums: [H, S]; into: for those of q, k and
    v. q and outputs are [H, S, D], k and v [K, S, D]. Scores and their gradients are in fp32, as in torch's kernel."""
    q, k, v, out, grad = given
    dq, dk, dv = into
    heads, seq, width = q.shape
    scale, wide, each = width**-0.5, sums.dtype, heads // len(k)
    if each > 1:
        k, v = k.repeat_interleave(each, 0), v.repeat_interleave(each, 0)
    mean = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    whole = seq <= ATTENTION_ROWS
    keys, values = (torch.empty if whole else torch.zeros)((2, heads, seq, width), dtype=wide)
    for a in range(0, seq, ATTENTION_ROWS):
        rows, seen = slice(a, a + ATTENTION_ROWS), slice(0, a + ATTENTION_ROWS)
        low_q, low_grad = q[:, rows], grad[:, rows]
        p = torch.baddbmm(sums[:, rows, None], low_q.to(wide), k[:, seen].to(wide).mT, beta=-1, alpha=scale).exp_()
        p[:, :, rows].tril_()
        ds = torch.bmm(low_grad.to(wide), v[:, seen].to(wide).mT).sub_(mean[:, rows]).mul_(p)
        p, ds = p.to(q.dtype), ds.to(q.dtype)
        dq[:, rows] = torch.bmm(ds, k[:, seen]).mul_(scale)
        if whole:
            keys, values = torch.bmm(ds.mT, low_q), torch.bmm(p.mT, low_grad)
        else:
            keys[:, seen] += torch.bmm(ds.mT, low_q)
            values[:, seen] += torch.bmm(p.mT, low_grad)
    keys.mul_(scale)
    if each > 1:
        keys, values = (x.unflatten(0, (-1, each)).sum(1, dtype=wide) for x in (keys, values))
    dk.copy_(keys)
    dv.copy_(values)


def shorten_attention(decoder: Decoder) -> None:
    """Give every fused attention core this backward, where attention is causal and plain, sequences short, on a CPU."""
    for core in (module for module in decoder.modules() if isinstance(module, CoreAttention)):
        if core.kind == "sdpa":
            swap_forward(core, _of_core(core, core.forward))


def _of_core(core: CoreAttention, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        longest = LONGEST_SHORT.get(str(q.dtype).removeprefix("torch."), 0)
        short = q.device.type == "cpu" and SHORTEST <= q.shape[1] <= longest
        if not short or core.mask(batch, q.dtype) is not None:
            return plain(q, k, v, batch)
        out: Tensor = _ShortAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
        return out

    return forward
