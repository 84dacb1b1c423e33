"""Cross-entropy on CUDA: the sums of large blocks of rows, and gradients on the logits in place.

Launches cost more than passes over memory there, so blocks are as large as memory allows (`limits.py`). Under
compile=block a compiler makes each of the two functions one pass, without any block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.ops.cuda.limits import loss_rows


class LossForm(NamedTuple):
    """The two passes over logits [n, columns] of a cross-entropy."""

    log_sums: Callable[[Tensor, Tensor | None, torch.dtype], Tensor]
    """(logits, columns [n, 1], dtype) -> log-sum-exp of each row [n], in `dtype`. columns: any of each row; None for
    the largest ones, which have the sums best where ranks compare them."""
    differentiate: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]
    """(logits, their log-sum-exp [n], factor [n], target column [n, 1], `there` [n, 1]): overwrite the logits with
    softmax * factor, and `there` added at the target columns."""


def log_sums(rows: Tensor, columns: Tensor | None, wide: torch.dtype) -> Tensor:
    """Log-sum-exp of each row: a column's logit less its log-probability."""
    lse = torch.empty(len(rows), dtype=wide, device=rows.device)
    step = loss_rows(len(rows), rows.shape[1], wide.itemsize)
    room = torch.empty(step, rows.shape[1], dtype=wide, device=rows.device)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        logged = room[: len(part)].copy_(part)
        torch.log_softmax(logged, -1, out=logged)
        if columns is None:
            torch.sub(part.amax(-1), logged.amax(-1), out=lse[start : start + step])
        else:
            at = columns[start : start + step]
            torch.sub(part.gather(1, at), logged.gather(1, at), out=lse[start : start + step, None])
    return lse


def differentiate(rows: Tensor, lse: Tensor, factor: Tensor, columns: Tensor, there: Tensor) -> None:
    """The gradient, in three passes without another tensor: torch's softmax in place, its product and the targets."""
    torch.softmax(rows, -1, out=rows)
    targets = rows.gather(1, columns).to(there.dtype).mul_(factor[:, None]).add_(there)
    rows.mul_(factor[:, None])
    rows.scatter_(1, columns, targets.to(rows.dtype))


BLOCKS = LossForm(log_sums, differentiate)
"""Eager kernels."""


def _log_sums(rows: Tensor, columns: Tensor | None, wide: torch.dtype) -> Tensor:
    return torch.logsumexp(rows.to(wide), -1)


def _differentiate(rows: Tensor, lse: Tensor, factor: Tensor, columns: Tensor, there: Tensor) -> None:
    softmax = (rows.to(lse.dtype) - lse[:, None]).exp() * factor[:, None]
    hit = torch.arange(rows.shape[1], device=rows.device) == columns
    rows.copy_(torch.where(hit, softmax + there, softmax))


@cache
def one_pass() -> LossForm:
    """Each function as one kernel of torch's compiler."""
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
    return LossForm(torch.compile(_log_sums, **options), torch.compile(_differentiate, **options))
