"""Tensor and sequence parallelism, applied to a plain decoder from outside by the table in `layout/placement.py`.

Column-parallel: y_r = x W_r^T; the input's gradient is summed over tp. Row-parallel: y = sum_r x_r W_r^T. With sequence
parallelism (Korthikanti et al. 2022) x and y are sharded along the sequence: a column-parallel map gathers its input
first (and again in backward, so that only the shard is saved), a row-parallel map scatters its sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder import Decoder
from shardwise.decoder.attention import Attention
from shardwise.decoder.modules import Linear, Linears, Lookup, TiedLinear, swap_forward
from shardwise.layout.placement import kind_of, place
from shardwise.layout.units import UnitPlan
from shardwise.runtime.comms import Comms, Pending

SEQUENCE_DIM = 1


@dataclass(frozen=True)
class Site:
    """Where a parallel map communicates: through whom, for which unit, and whether sequences are sharded."""

    comms: Comms
    unit: str
    sequence: bool

    def gather(self, x: Tensor) -> Tensor:
        return self.comms.gather_dim(x, SEQUENCE_DIM, "tp", self.unit) if self.sequence else x

    def reduce(self, x: Tensor) -> Tensor:
        """Sum partial results over tp: to everyone, or scattered along the sequence."""
        if self.sequence:
            return self.comms.reduce_scatter_dim(x, SEQUENCE_DIM, "tp", self.unit)
        self.comms.all_reduce(x, "tp", self.unit)
        return x

    def reduce_later(self, x: Tensor) -> tuple[Tensor, Pending | None]:
        """Like `reduce`, but an all-reduce may still be under way when this returns."""
        if self.sequence:
            return self.reduce(x), None
        return x, self.comms.all_reduce(x, "tp", self.unit, later=True)


class _Column(torch.autograd.Function):
    """(y_1, y_2, ...) = x (W_1, W_2, ...)^T for local rows of each W. Saves the local x."""

    @staticmethod
    def forward(ctx: Any, site: Site, x: Tensor, count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = tensors[:count], tensors[count:]
        full = site.gather(x)
        ctx.site, ctx.biased = site, [b is not None for b in biases]
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(full, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        site: Site = ctx.site
        rows = [dy.reshape(-1, dy.shape[-1]) for dy in grads]
        dx = rows[0] @ weights[0]
        for dy, weight in zip(rows[1:], weights[1:], strict=True):
            dx.addmm_(dy, weight)
        dx, pending = site.reduce_later(dx.view(*grads[0].shape[:-1], -1))
        full = site.gather(x)
        columns = full.reshape(-1, full.shape[-1])
        dws = [dy.t() @ columns for dy in rows]
        dbs = [dy.sum(0) if biased else None for dy, biased in zip(rows, ctx.biased, strict=True)]
        if pending is not None:
            pending.wait()
        return (None, dx, None, *dws, *dbs)


class _Row(torch.autograd.Function):
    """y = sum over ranks of x_r W_r^T, plus the bias once. Saves the local x."""

    @staticmethod
    def forward(ctx: Any, site: Site, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.site, ctx.biased = site, bias is not None
        ctx.save_for_backward(x, weight)
        y = site.reduce(F.linear(x, weight))
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        (dy,) = grads
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.biased else None
        full = ctx.site.gather(dy)
        rows = full.reshape(-1, full.shape[-1])
        dx = (rows @ weight).view(*full.shape[:-1], -1)
        return None, dx, rows.t() @ x.reshape(-1, x.shape[-1]), db


class _VocabLookup(torch.autograd.Function):
    """Rows of a table cut by vocabulary: each rank looks up the ids it holds, the rest are zero, the sum is the row."""

    @staticmethod
    def forward(ctx: Any, site: Site, ids: Tensor, weight: Tensor, start: int, stop: int) -> Tensor:
        local = torch.where((ids >= start) & (ids < stop), ids - start, -1)
        ctx.site, ctx.shape = site, weight.shape
        ctx.save_for_backward(local)
        y = F.embedding(local.clamp(min=0), weight).masked_fill_((local < 0).unsqueeze(-1), 0)
        return site.reduce(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (local,) = ctx.saved_tensors
        dy = ctx.site.gather(grads[0]).masked_fill((local < 0).unsqueeze(-1), 0)
        dw = torch.ops.aten.embedding_dense_backward(dy, local.clamp(min=0), ctx.shape[0], -1, False)
        return None, None, dw, None, None


def _column(site: Site, maps: list[Any]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = _Column.apply(site, x, len(maps), *(m.weight for m in maps), *(m.bias for m in maps))  # type: ignore[no-untyped-call]
        return out

    return forward


def _row(site: Site, module: Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: _Row.apply(site, x, module.weight, module.bias)  # type: ignore[no-untyped-call]


def _lookup(site: Site, module: Lookup, start: int, stop: int) -> Callable[[Tensor], Tensor]:
    return lambda ids: _VocabLookup.apply(site, ids, module.weight, start, stop)  # type: ignore[no-untyped-call]


def apply_tensor_parallel(decoder: Decoder, plan: UnitPlan, comms: Comms) -> None:
    """Give every module that the table names its parallel forward. Weights are cut elsewhere (`engine.py`)."""
    if plan.layout.tp == 1:
        return
    for unit, part in decoder.parts():
        site = Site(comms, unit, plan.layout.sp)
        for name, module in part.named_modules(prefix=unit):
            _parallelise(module, name, site, plan)


def _parallelise(module: nn.Module, name: str, site: Site, plan: UnitPlan) -> None:
    if isinstance(module, Linears):
        swap_forward(module, _column(site, list(module.children())))
    elif isinstance(module, Linear | TiedLinear) and kind_of(f"{name}.weight") == "vocab":
        column = _column(site, [module])
        swap_forward(module, lambda x: column(x)[0])
    elif isinstance(module, Linear) and kind_of(f"{name}.weight") == "row":
        swap_forward(module, _row(site, module))
    elif isinstance(module, Lookup):
        swap_forward(module, _lookup(site, module, *vocabulary_range(plan)))
    elif isinstance(module, Attention):
        module.core.first_head = plan.tp_rank * (plan.model.heads // plan.layout.tp)


def vocabulary_range(plan: UnitPlan) -> tuple[int, int]:
    """First and last + 1 token id whose logits and embedding rows this tp rank holds."""
    table = next(p for unit in plan.units for p in unit.placed if p.name == "embedding.tokens.weight")
    placed = place(table.parameter, plan.model, plan.layout, plan.tp_rank)
    return (placed.start, placed.stop) if placed.dim is not None else (0, plan.model.vocab)
