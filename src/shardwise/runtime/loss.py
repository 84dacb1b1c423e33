"""Cross-entropy over a vocabulary that may be cut over tp ranks: the summed loss of the valid tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.model.chunking import loss_chunk
from shardwise.runtime.comms import Comms

IGNORED = -100


def _chunks(rows: Tensor) -> Iterator[slice]:
    step = max(1, loss_chunk(rows.numel()) // max(1, rows.shape[1]))
    return (slice(a, a + step) for a in range(0, len(rows), step))


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits, the log-sum-exp of each token and the targets; the backward overwrites the logits.

    Works through a few rows at a time, which the cache holds from one operation to the next, and no second copy of the
    logits exists in any precision. The sums start from this rank's own maxima and are scaled to those of all.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, stop: int, comms: Comms) -> Tensor:
        rows = logits.detach().view(-1, logits.shape[-1])
        rows[:, stop - start :] = torch.finfo(logits.dtype).min  # columns that only pad the vocabulary
        flat = targets.reshape(-1)
        wide = torch.float32 if logits.dtype == torch.bfloat16 else logits.dtype
        own = torch.empty(len(flat), dtype=wide, device=logits.device)
        sums = torch.empty(2, len(flat), dtype=wide, device=logits.device)
        for part in _chunks(rows):
            torch.amax(rows[part].to(wide), -1, out=own[part])
            # The largest log-probability is -log(sum exp(x - max)); torch's softmax has the fastest exponential.
            torch.amax(torch.log_softmax(rows[part], -1, dtype=wide), -1, out=sums[0, part])
        own_lse = own - sums[0]
        top = own.clone()
        comms.all_reduce(top, "tp", "cross-entropy", maximum=True)
        torch.exp(own_lse - top, out=sums[0])
        local, inside = _local(flat, start, stop)
        torch.mul(rows.gather(1, local[:, None])[:, 0], inside, out=sums[1])
        comms.all_reduce(sums, "tp", "cross-entropy")
        lse = top.add_(sums[0].log())
        ctx.start, ctx.stop = start, stop
        ctx.save_for_backward(rows, lse, targets, own_lse if comms.size("tp") > 1 else None)
        return torch.where(flat == IGNORED, 0.0, lse - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, lse, targets, own_lse = ctx.saved_tensors
        flat = targets.reshape(-1)
        scale = torch.where(flat == IGNORED, 0.0, grads[0].to(lse.dtype))
        # Softmax over the columns at hand is that over all of them but for a factor a row.
        factor = scale.clone() if own_lse is None else scale * (own_lse - lse).exp_()
        local, inside = _local(flat, ctx.start, ctx.stop)
        there = scale.mul_(inside).neg_()[:, None]
        for part in _chunks(rows):
            softmax = torch.softmax(rows[part], -1, dtype=lse.dtype).mul_(factor[part, None])
            rows[part] = softmax.scatter_add_(1, local[part, None], there[part])
        return rows.view(*targets.shape, -1), None, None, None, None


def _local(targets: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """(column of each target among the local ones, 0 elsewhere; whether it is local)."""
    inside = (targets >= start) & (targets < stop)
    return torch.where(inside, targets - start, 0), inside


def summed_cross_entropy(logits: Tensor, targets: Tensor, start: int, stop: int, comms: Comms) -> Tensor:
    """Sum over tokens of -log p(target).

    logits: [B, S, columns], those of vocabulary ids [start, stop), further columns being padding; overwritten by
    backward. targets: [B, S], `IGNORED` where a token does not count. Returns a scalar in fp32 (fp64 for fp64 logits).
    """
    out: Tensor = _CrossEntropy.apply(logits, targets, start, stop, comms)  # type: ignore[no-untyped-call]
    return out
