"""Cross-entropy on CUDA: the sums of large blocks of rows, and gradients on the logits in place.

Launches cost more than passes over memory there, so blocks are as large as memory allows (`limits.py`). Where Triton
is, two kernels read the logits once each, without any block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.ops.limits import loss_rows


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


_BLOCK = 4096
"""Logits that a program reads per step."""


@cache
def _kernels() -> Any:
    return import_module("shardwise.ops.cuda.loss_kernels")


def _log_sums(rows: Tensor, columns: Tensor | None, wide: torch.dtype) -> Tensor:
    if rows.dtype == torch.float64:
        return log_sums(rows, columns, wide)
    out = torch.empty(len(rows), dtype=wide, device=rows.device)
    _kernels().log_sums[(len(rows),)](rows, out, rows.shape[1], BLOCK=_BLOCK, num_warps=8)
    return out


def _differentiate(rows: Tensor, lse: Tensor, factor: Tensor, columns: Tensor, there: Tensor) -> None:
    if rows.dtype == torch.float64:
        return differentiate(rows, lse, factor, columns, there)
    grid = len(rows), -(-rows.shape[1] // _BLOCK)
    _kernels().differentiate[grid](
        rows, lse, factor, columns.contiguous(), there.contiguous(), rows.shape[1], BLOCK=_BLOCK, num_warps=8
    )
    return None


ONE_PASS = LossForm(_log_sums, _differentiate)
"""Triton's kernels, which read the logits once each; fp64, which they do not sum in, by eager ones."""


def cuda_form() -> LossForm:
    return ONE_PASS if find_spec("triton") is not None else BLOCKS
