"""Fused attention on a CPU for short sequences: few large products in place of many small.

torch's fused kernel works on small tiles where a sequence is short, and its backward on those that bf16 is slow on:
batched products over all heads of a sequence take less time up to `LONGEST_SHORT` tokens (docs/performance.md). In fp32
that goes for the forward, too; in bf16 it is torch's. What is saved is what torch saves: queries, keys, values, the
output and its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.decoder import Batch
from shardwise.decoder.attention import CoreAttention
from shardwise.decoder.modules import swap_forward
from shardwise.model.chunking import ATTENTION_ROWS, LONGEST_SHORT, SHORTEST


class _ShortAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(D)) v, causal. q: [B, S, H, D]; k, v: [B, S, K, D] with K dividing H; returns q's shape."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        if hidden is None:
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, sums = fused(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, True)
            out = out.transpose(1, 2)
        else:
            out, sums = _products(q, k, v, hidden)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, sums = ctx.saved_tensors
        heads, shared = q.shape[2], k.shape[2]
        # Side by side, as the product that made q, k and v wants them.
        made = q.new_empty(*q.shape[:2], heads + 2 * shared, q.shape[3])
        sequences = (x.transpose(1, 2).unbind() for x in (q, k, v, out, grads[0], made))
        for *given, own, each in zip(*sequences, sums.unsqueeze(-1).unbind(), strict=True):
            into = own.split([heads, shared, shared])
            if q.shape[1] <= ATTENTION_ROWS:
                _at_once(given, each, into)
            else:
                _by_rows(given, each, into)
        dq, dk, dv = made.split([heads, shared, shared], 2)
        return dq, dk, dv, None


def _products(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """(output [B, S, H, D], log-sum-exp [B, H, S]). hidden: [S, S], what is added to scores."""
    out, sums, each = torch.empty_like(q, memory_format=torch.contiguous_format), [], q.shape[2] // k.shape[2]
    for *given, into in zip(*(x.transpose(1, 2).unbind() for x in (q, k, v, out)), strict=True):
        queries, keys, values = given
        if each > 1:
            keys, values = keys.repeat_interleave(each, 0), values.repeat_interleave(each, 0)
        scores = torch.baddbmm(hidden, queries, keys.mT, alpha=q.shape[3] ** -0.5)
        p = torch.softmax(scores, -1)
        # A score less the logarithm of its probability is the sum's; the largest has it best.
        sums.append(scores.amax(-1).sub_(p.amax(-1).log_()))
        into.copy_(torch.bmm(p, values))
    return out, torch.stack(sums)


def _at_once(given: list[Tensor], sums: Tensor, into: Sequence[Tensor]) -> None:
    """The gradients of one sequence, all queries at once. given: q, k, v, output and its gradient; sums: [H, S, 1];
    into: for those of q, k and v. q and outputs are [H, S, D], k and v [K, S, D]. Scores and their gradients are in
    fp32, as in torch's kernel."""
    q, k, v, out, grad = given
    scale, each = q.shape[2] ** -0.5, len(q) // len(k)
    if each > 1:
        k, v = k.repeat_interleave(each, 0), v.repeat_interleave(each, 0)
    p, ds = _probabilities(q, k, v, grad, sums, _mean(grad, out, sums.dtype), scale)
    p, ds = p.tril_().to(q.dtype), ds.mul_(p).to(q.dtype)
    into[0].copy_(torch.bmm(ds, k))
    for x, found in zip(into[1:], (torch.bmm(ds.mT, q), torch.bmm(p.mT, grad)), strict=True):
        x.copy_(found if each == 1 else found.unflatten(0, (-1, each)).sum(1, dtype=sums.dtype))


def _mean(grad: Tensor, out: Tensor, wide: torch.dtype) -> Tensor:
    return (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)


def _probabilities(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, sums: Tensor, mean: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(probabilities, their gradients less the mean, times scale), of queries and keys also where these are hidden."""
    wide = sums.dtype
    p = torch.baddbmm(sums, q.to(wide), k.to(wide).mT, beta=-1, alpha=scale).exp_()
    return p, torch.baddbmm(mean, grad.to(wide), v.to(wide).mT, beta=-scale, alpha=scale)


def _by_rows(given: list[Tensor], sums: Tensor, into: Sequence[Tensor]) -> None:
    """The same for some queries at a time."""
    q, k, v, out, grad = given
    dq, dk, dv = into
    heads, seq, width = q.shape
    scale, wide, each = width**-0.5, sums.dtype, heads // len(k)
    if each > 1:
        k, v = k.repeat_interleave(each, 0), v.repeat_interleave(each, 0)
    mean = _mean(grad, out, wide)
    keys, values = torch.zeros((2, heads, seq, width), dtype=wide)
    for a in range(0, seq, ATTENTION_ROWS):
        rows, seen = slice(a, a + ATTENTION_ROWS), slice(0, a + ATTENTION_ROWS)
        low_q, low_grad = q[:, rows], grad[:, rows]
        p, ds = _probabilities(low_q, k[:, seen], v[:, seen], low_grad, sums[:, rows], mean[:, rows], scale)
        p[:, :, rows].tril_()
        p, ds = p.to(q.dtype), ds.mul_(p).to(q.dtype)
        dq[:, rows] = torch.bmm(ds, k[:, seen])
        keys[:, seen] += torch.bmm(ds.mT, low_q)
        values[:, seen] += torch.bmm(p.mT, low_grad)
    if each > 1:
        keys, values = (x.unflatten(0, (-1, each)).sum(1, dtype=wide) for x in (keys, values))
    dk.copy_(keys)
    dv.copy_(values)


def shorten_attention(whole: nn.Module) -> None:
    """Let every fused attention core in `whole` compute so, where attention is causal and plain, sequences short, on a
    CPU."""
    for core in (module for module in whole.modules() if isinstance(module, CoreAttention)):
        if core.kind == "sdpa":
            swap_forward(core, _of_core(core, core.forward))


def _of_core(core: CoreAttention, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        longest = LONGEST_SHORT.get(str(q.dtype).removeprefix("torch."), 0)
        short = q.device.type == "cpu" and SHORTEST <= q.shape[1] <= longest
        if not short or core.mask(batch, q.dtype) is not None:
            return plain(q, k, v, batch)
        hidden = _hidden(batch, q) if q.dtype == torch.float32 else None
        out: Tensor = _ShortAttention.apply(q, k, v, hidden)  # type: ignore[no-untyped-call]
        return out

    return forward


def _hidden(batch: Batch, q: Tensor) -> Tensor:
    """[S, S]: 0 for keys that a query sees, else minus infinity."""
    s = q.shape[1]
    mask: Tensor = batch.shared("hidden", lambda: q.new_full((s, s), -torch.inf).triu_(1))
    return mask
