"""Attention on a CPU for short sequences: a few large products in place of many small ones.

torch's fused kernel uses small tiles for short sequences, and its backward uses tiles on which bf16 is slow. Batched
products over all heads of a sequence take less time up to `LONGEST_SHORT` tokens: in backward,
and in fp32 also in forward. Saves queries, keys, values and the output. Backward recomputes the probabilities with
torch's softmax, which takes less than half the time of `exp` and needs no sums.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder import Batch
from shardwise.decoder.attention import CoreAttention
from shardwise.ops.context import OpContext
from shardwise.ops.limits import ATTENTION_ROWS, LONGEST_SHORT, SHORTEST


class _ShortAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(D)) v, causal. q: [B, S, H, D]; k, v: [B, S, K, D] with K dividing H; returns q's shape."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        if q.dtype == torch.float32 and q.shape[1] <= ATTENTION_ROWS:
            out = _products(q, k, v, hidden)
        else:
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out = fused(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, True)[0].transpose(1, 2)
        ctx.hidden = hidden
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out = ctx.saved_tensors
        heads, shared = q.shape[2], k.shape[2]
        # Side by side, as the product that made q, k and v wants them.
        made = q.new_empty(*q.shape[:2], heads + 2 * shared, q.shape[3])
        for *given, own in zip(*(x.transpose(1, 2).unbind() for x in (q, k, v, out, grads[0], made)), strict=True):
            into = own.split([heads, shared, shared])
            (_at_once if q.shape[1] <= ATTENTION_ROWS else _by_rows)(given, ctx.hidden, into)
        dq, dk, dv = made.split([heads, shared, shared], 2)
        return dq, dk, dv, None


def hidden_keys(length: int, device: torch.device) -> Tensor:
    """Additive mask of up to `ATTENTION_ROWS` queries and as many keys: minus infinity where a query does not see a
    key."""
    rows = min(length, ATTENTION_ROWS)
    return torch.full((rows, rows), -torch.inf, device=device).triu_(1)


def _products(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    out, each = torch.empty_like(q, memory_format=torch.contiguous_format), q.shape[2] // k.shape[2]
    for *given, into in zip(*(x.transpose(1, 2).unbind() for x in (q, k, v, out)), strict=True):
        queries, keys, values = given
        if each > 1:
            keys, values = keys.repeat_interleave(each, 0), values.repeat_interleave(each, 0)
        into.copy_(torch.bmm(_probabilities(queries, keys, hidden), values))
    return out


def _probabilities(q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    """[H, n, keys], in fp32. q: [H, n, D]; k: [H, keys, D]; hidden: [n, keys]."""
    return torch.softmax(torch.baddbmm(hidden, _wide(q), _wide(k).mT, alpha=q.shape[2] ** -0.5), -1)


def _wide(x: Tensor) -> Tensor:
    """In fp32 and contiguous: of others the product takes half as long again."""
    return x.to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def _at_once(given: list[Tensor], hidden: Tensor, into: Sequence[Tensor]) -> None:
    """The gradients of one sequence, all queries at once. given: q, k, v, output and its gradient; into: for those of
    q, k and v. q and outputs are [H, S, D], k and v [K, S, D]. Scores and their gradients are in fp32, as in torch's
    kernel."""
    q, k, v, out, grad = given
    each = len(q) // len(k)
    if each > 1:
        k, v = k.repeat_interleave(each, 0), v.repeat_interleave(each, 0)
    p = _probabilities(q, k, hidden)
    ds = _of_scores(p, grad, v, _mean(grad, out)).to(q.dtype)
    into[0].copy_(torch.bmm(ds, k))
    for x, found in zip(into[1:], (torch.bmm(ds.mT, q), torch.bmm(p.to(q.dtype).mT, grad)), strict=True):
        x.copy_(found if each == 1 else found.unflatten(0, (-1, each)).sum(1, dtype=torch.float32))


def _mean(grad: Tensor, out: Tensor) -> Tensor:
    """Row sums that softmax's backward subtracts from the gradients of the probabilities: [H, S, 1]."""
    return (grad.float() * out.float()).sum(-1, keepdim=True)


def _of_scores(p: Tensor, grad: Tensor, v: Tensor, mean: Tensor) -> Tensor:
    """The gradients of the products q k^T, which the scale is part of."""
    scale = v.shape[2] ** -0.5
    return torch.baddbmm(mean, _wide(grad), _wide(v).mT, beta=-scale, alpha=scale).mul_(p)


def _by_rows(given: list[Tensor], hidden: Tensor, into: Sequence[Tensor]) -> None:
    q, k, v, out, grad = given
    dq, dk, dv = into
    heads, seq, width = q.shape
    each = heads // len(k)
    if each > 1:
        k, v = k.repeat_interleave(each, 0), v.repeat_interleave(each, 0)
    mean = _mean(grad, out)
    keys, values = torch.zeros((2, heads, seq, width))
    for a in range(0, seq, ATTENTION_ROWS):
        rows, seen, n = slice(a, a + ATTENTION_ROWS), slice(0, a + ATTENTION_ROWS), min(ATTENTION_ROWS, seq - a)
        low_q, low_grad = q[:, rows], grad[:, rows]
        p = _probabilities(low_q, k[:, seen], F.pad(hidden[:n, :n], (a, 0)))
        ds = _of_scores(p, low_grad, v[:, seen], mean[:, rows]).to(q.dtype)
        dq[:, rows] = torch.bmm(ds, k[:, seen])
        keys[:, seen] += torch.bmm(ds.mT, low_q)
        values[:, seen] += torch.bmm(p.to(q.dtype).mT, low_grad)
    if each > 1:
        keys, values = (x.unflatten(0, (-1, each)).sum(1) for x in (keys, values))
    dk.copy_(keys)
    dv.copy_(values)


def short_attention(core: CoreAttention, at: OpContext) -> Callable[..., Tensor] | None:
    """Batched products in place of the fused kernel, where attention is causal and plain, and sequences are short."""
    if not core.plain or core.narrow:
        return None
    plain = core.forward

    def forward(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        longest = LONGEST_SHORT.get(str(q.dtype).removeprefix("torch."), 0)
        short = q.device.type == "cpu" and SHORTEST <= q.shape[1] <= longest
        if not short or core.mask(batch, q.dtype) is not None:
            return plain(q, k, v, batch)
        hidden = batch.shared("hidden keys", lambda: hidden_keys(q.shape[1], q.device))
        out: Tensor = _ShortAttention.apply(q, k, v, hidden)  # type: ignore[no-untyped-call]
        return out

    return forward
