"""Cross-entropy over a vocabulary that may be cut over tp ranks: the summed loss of the valid tokens."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.layout.axes import TP
from shardwise.ops.cuda.cross_entropy import LossForm, cuda_form
from shardwise.ops.limits import loss_chunk
from shardwise.runtime.transport.comms import Comms

IGNORED = -100


def _chunks(rows: Tensor) -> Iterator[slice]:
    step = max(1, loss_chunk(rows.numel()) // max(1, rows.shape[1]))
    return (slice(a, a + step) for a in range(0, len(rows), step))


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits, the log-sum-exp of each token and the targets; the backward overwrites the logits.

    Processes blocks of rows that stay in a CPU's cache from one operation to the next, without a second copy of the
    logits in any precision; `form` does so otherwise. The sums over this rank's columns are scaled to the sums over all
    columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        start: int,
        stop: int,
        comms: Comms,
        cap: float | None,
        form: LossForm | None,
    ) -> Tensor:
        rows = logits.detach().view(-1, logits.shape[-1])
        if cap:
            rows.div_(cap).tanh_().mul_(cap)
        if rows.shape[1] > stop - start:
            rows[:, stop - start :] = torch.finfo(logits.dtype).min  # columns that only pad the vocabulary
        flat, split = targets.reshape(-1), comms.size(TP) > 1
        wide = torch.float32 if logits.dtype == torch.bfloat16 else logits.dtype
        local = (_column(flat, start, stop) if split else flat.clamp(min=0))[:, None]
        target = rows.gather(1, local)
        if form:
            own_lse = form.log_sums(rows, None if split else local, wide)
        else:
            own_lse = _log_sums(rows, target, local, split, wide)
        lse, target = own_lse, target[:, 0].to(wide)
        if split:
            top = own_lse.clone()
            comms.all_reduce(top, TP, "cross-entropy", maximum=True)
            sums = torch.stack([torch.exp(own_lse - top), target * _inside(flat, start, stop)])
            comms.all_reduce(sums, TP, "cross-entropy")
            lse, target = top.add_(sums[0].log()), sums[1]
        ctx.start, ctx.stop, ctx.cap, ctx.form = start, stop, cap, form
        ctx.save_for_backward(rows, lse, targets, own_lse if split else None)
        return torch.where(flat == IGNORED, 0.0, lse - target).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, lse, targets, own_lse = ctx.saved_tensors
        flat = targets.reshape(-1)
        factor = torch.where(flat == IGNORED, 0.0, grads[0].to(lse.dtype))
        if own_lse is None:
            own_lse, local, there = lse, flat.clamp(min=0)[:, None], -factor[:, None]
        else:
            local = _column(flat, ctx.start, ctx.stop)[:, None]
            there = -(factor * _inside(flat, ctx.start, ctx.stop))[:, None]
            # Softmax over the columns at hand is that over all of them but for a factor a row.
            factor = factor * (own_lse - lse).exp_()
        if ctx.form:
            ctx.form.differentiate(rows, own_lse, factor, local, there)
        else:
            _differentiate(rows, factor, local, there, lse.dtype, ctx.cap)
        return rows.view(*targets.shape, -1), None, None, None, None, None, None


def _log_sums(rows: Tensor, target: Tensor, local: Tensor, split: bool, wide: torch.dtype) -> Tensor:
    """Log-sum-exp of each row [n]. target [n, 1]: the logits of the columns `local`."""
    lse = torch.empty(len(rows), dtype=wide, device=rows.device)
    for part in _chunks(rows):
        # A column's logit less its log-probability is the sum; torch's softmax has the fastest exponential. Over tp
        # sums are compared: the largest column has them best, the target's is the quickest.
        logged = torch.log_softmax(rows[part], -1, dtype=wide)
        if split:
            torch.sub(rows[part].amax(-1), logged.amax(-1), out=lse[part])
        else:
            torch.sub(target[part], logged.gather(1, local[part]), out=lse[part, None])
        del logged
    return lse


def _differentiate(
    rows: Tensor, factor: Tensor, local: Tensor, there: Tensor, wide: torch.dtype, cap: float | None
) -> None:
    """Overwrite logits with softmax * factor [n], plus `there` [n, 1] at the columns `local`."""
    for part in _chunks(rows):
        softmax = torch.softmax(rows[part], -1, dtype=wide).mul_(factor[part, None])
        softmax.scatter_add_(1, local[part], there[part])
        if cap:  # columns that only pad the vocabulary are beyond any cap
            softmax.mul_(torch.div(rows[part], cap).clamp_(min=-1).square_().neg_().add_(1))
        rows[part] = softmax
        del softmax  # before the next one is made


def _inside(targets: Tensor, start: int, stop: int) -> Tensor:
    return (targets >= start) & (targets < stop)


def _column(targets: Tensor, start: int, stop: int) -> Tensor:
    """The column of each target among the local ones, 0 where it is elsewhere."""
    return torch.where(_inside(targets, start, stop), targets - start, 0)


def loss_form(device: torch.device, cap: float | None) -> LossForm | None:
    """The form of a device's loss; None for blocks in a CPU's cache, which also a cap of the logits needs."""
    if device.type != "cuda" or cap:
        return None
    return cuda_form()


def summed_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    start: int,
    stop: int,
    comms: Comms,
    cap: float | None = None,
    form: LossForm | None = None,
) -> Tensor:
    """Sum over tokens of -log p(target). cap: logits become cap tanh(logits / cap), in place.

    logits: [B, S, columns], those of vocabulary ids [start, stop), further columns being padding; overwritten by
    backward. targets: [B, S], `IGNORED` where a token does not count. form: of `loss_form`. Returns a scalar in fp32
    (fp64 for fp64 logits).
    """
    out: Tensor = _CrossEntropy.apply(logits, targets, start, stop, comms, cap, form)  # type: ignore[no-untyped-call]
    return out
