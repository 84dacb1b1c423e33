"""Linear maps and lookups of a step: whole or split over tp ranks, their weights' gradients written where they stay.

Column-parallel: y_r = x W_r^T; the input's gradient is summed over tp. Row-parallel: y = sum_r x_r W_r^T. With sequence
parallelism (Korthikanti et al. 2022) x and y are sharded along the sequence: a column-parallel map gathers its input
first (and again in backward, so that only the shard is saved), a row-parallel map scatters its sum. Without tensor
parallelism nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder.modules import Linear, Lookup, TiedLinear
from shardwise.layout.axes import TP
from shardwise.runtime.transport.comms import DONE, Comms, Waitable
from shardwise.runtime.zero.gradients import WeightGradients, grad_slot

SEQUENCE_DIM = 1

Map = Linear | TiedLinear


@dataclass(frozen=True)
class TPContext:
    """Tensor-parallel context of a linear map: through whom it communicates, in which part, whether sequences are
    sharded, and who decides when the gradients of its weights are computed."""

    comms: Comms
    unit: str
    sequence: bool
    weights: WeightGradients

    def gather(self, x: Tensor) -> Tensor:
        return self.comms.gather_dim(x, SEQUENCE_DIM, TP, self.unit) if self.sequence else x

    def reduce(self, x: Tensor) -> Tensor:
        """Sum partial results over tp: to everyone, or scattered along the sequence."""
        if self.sequence:
            return self.comms.reduce_scatter_dim(x, SEQUENCE_DIM, TP, self.unit)
        self.comms.all_reduce(x, TP, self.unit)
        return x

    def reduce_later(self, x: Tensor) -> tuple[Tensor, Waitable]:
        """Like `reduce`, but an all-reduce may still be under way when this returns."""
        if self.sequence:
            return self.reduce(x), DONE
        return x, self.comms.all_reduce(x, TP, self.unit, later=True)


def as_rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


class _Column(torch.autograd.Function):
    """(y_1, y_2, ...) = x (W_1, W_2, ...)^T for local rows of each W. Saves the local x."""

    @staticmethod
    def forward(ctx: Any, site: TPContext, maps: list[Map], x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        full = site.gather(x)
        ctx.site, ctx.maps = site, maps
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(full, w, m.bias) for m, w in zip(maps, weights, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        site: TPContext = ctx.site
        dys = [as_rows(dy) for dy in grads]
        dx = dys[0] @ weights[0]
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            dx.addmm_(dy, weight)
        dx, pending = site.reduce_later(dx.view(*grads[0].shape[:-1], -1))
        maps: list[Map] = ctx.maps
        x = x.detach()  # without the graph that made it, which would outlive its backward

        def products() -> None:
            columns = as_rows(site.gather(x))
            for module, dy in zip(maps, dys, strict=True):
                grad_slot(module.weight).add_product(dy.t(), columns)

        site.weights.add(site.unit, products, x, *dys)
        for module, dy in zip(maps, dys, strict=True):
            add_bias(module, dy)
        pending.wait()
        return (None, None, dx, *[None] * len(weights))


class _Row(torch.autograd.Function):
    """y = sum over ranks of x_r W_r^T, plus the bias once. Saves the local x."""

    @staticmethod
    def forward(ctx: Any, site: TPContext, module: Linear, x: Tensor, weight: Tensor) -> Tensor:
        ctx.site, ctx.module = site, module
        ctx.save_for_backward(x, weight)
        y = site.reduce(F.linear(x, weight))
        return y if module.bias is None else y.add_(module.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        site, module, x = ctx.site, ctx.module, x.detach()
        full = site.gather(grads[0])
        rows = as_rows(full)
        dx = (rows @ weight).view(*full.shape[:-1], -1)
        site.weights.add(site.unit, lambda: grad_slot(module.weight).add_product(rows.t(), as_rows(x)), x, rows)
        add_bias(module, as_rows(grads[0]))
        return None, None, dx, None


def add_bias(module: Map, dy: Tensor) -> None:
    """dy: [T, out]."""
    if module.bias is not None:
        grad_slot(module.bias).add_sum(dy)


class _Lookup(torch.autograd.Function):
    """Rows of a table; `held` are the ids whose rows a rank has, None for all: the others are zero, and the sum over
    ranks is the row."""

    @staticmethod
    def forward(
        ctx: Any, site: TPContext, module: Lookup, held: tuple[int, int] | None, ids: Tensor, weight: Tensor
    ) -> Tensor:
        ctx.site, ctx.module, ctx.held = site, module, held
        if held is None:
            ctx.save_for_backward(ids)
            return F.embedding(ids, weight)
        local = torch.where((ids >= held[0]) & (ids < held[1]), ids - held[0], -1)
        ctx.save_for_backward(local)
        return site.reduce(F.embedding(local.clamp(min=0), weight).masked_fill_((local < 0).unsqueeze(-1), 0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (saved,) = ctx.saved_tensors
        site, module, split = ctx.site, ctx.module, ctx.held is not None

        def rows() -> None:
            dy, local = site.gather(grads[0]), saved
            if split:
                dy, local = dy.masked_fill((local < 0).unsqueeze(-1), 0), local.clamp(min=0)
            grad_slot(module.weight).add_rows(local.flatten(), as_rows(dy))

        site.weights.add(site.unit, rows, saved, grads[0])
        return None, None, None, None, None


def columns(site: TPContext, maps: list[Map]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The forward of several column-parallel maps of one input."""

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = _Column.apply(site, maps, x, *(m.weight for m in maps))  # type: ignore[no-untyped-call]
        return out

    return forward


def column(site: TPContext, module: Map) -> Callable[[Tensor], Tensor]:
    """The forward of one column-parallel map."""
    run = columns(site, [module])
    return lambda x: run(x)[0]


def row(site: TPContext, module: Linear) -> Callable[[Tensor], Tensor]:
    """The forward of a row-parallel map."""
    return lambda x: _Row.apply(site, module, x, module.weight)  # type: ignore[no-untyped-call]


def lookup(site: TPContext, module: Lookup, held: tuple[int, int] | None) -> Callable[[Tensor], Tensor]:
    """The forward of a lookup in a table of which this rank holds the rows of ids `held`, None for all."""
    return lambda ids: _Lookup.apply(site, module, held, ids, module.weight)  # type: ignore[no-untyped-call]
