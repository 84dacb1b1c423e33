"""Linear maps and lookups of a training step, their weights' gradients written where they stay.

One function serves every cut: what is communicated before and after the product is the map's `Around`. Under sequence
parallelism an input is gathered again in backward, so that only the shard is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder.modules import Linear, Linears, Lookup, TiedLinear
from shardwise.ops.context import Around, OpContext
from shardwise.ops.gradients import grad_slot

Map = Linear | TiedLinear


def as_rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    """(y_1, y_2, ...) = x (W_1, W_2, ...)^T for the local part of each W. Saves the local x."""

    @staticmethod
    def forward(
        ctx: Any, around: Around, at: OpContext, maps: list[Map], x: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        full = around.enter.forward(x)
        ctx.around, ctx.at, ctx.maps = around, at, maps
        ctx.save_for_backward(x, *weights)
        if around.late_bias:
            ys = (around.leave.forward(F.linear(full, w)) for w in weights)
            return tuple(y if m.bias is None else y.add_(m.bias) for m, y in zip(maps, ys, strict=True))
        return tuple(around.leave.forward(F.linear(full, w, m.bias)) for m, w in zip(maps, weights, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        around: Around = ctx.around
        at: OpContext = ctx.at
        maps: list[Map] = ctx.maps
        local = [around.leave.backward(dy)[0] for dy in grads]
        dys = [as_rows(dy) for dy in local]
        dx = dys[0] @ weights[0]
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            dx.addmm_(dy, weight)
        dx, pending = around.enter.backward(dx.view(*local[0].shape[:-1], -1))
        del local
        x = x.detach()  # without the graph that made it, which would outlive its backward

        def products() -> None:
            columns = as_rows(around.enter.forward(x))
            for module, dy in zip(maps, dys, strict=True):
                grad_slot(module.weight).add_product(dy.t(), columns)

        at.weights.add(at.unit, products, x, *dys)
        for module, dy in zip(maps, grads if around.late_bias else dys, strict=True):
            add_bias(module, as_rows(dy))
        pending.wait()
        return (None, None, None, dx, *[None] * len(weights))


def add_bias(module: Map, dy: Tensor) -> None:
    """dy: [T, out]."""
    if module.bias is not None:
        grad_slot(module.bias).add_sum(dy)


class _Lookup(torch.autograd.Function):
    """Rows of a table, of which the ids `at.vocabulary` are here: the others are zero, and what leaves is the sum."""

    @staticmethod
    def forward(ctx: Any, around: Around, at: OpContext, module: Lookup, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.around, ctx.at, ctx.module, held = around, at, module, at.vocabulary
        if held is None:
            ctx.save_for_backward(ids)
            return F.embedding(ids, weight)
        local = torch.where((ids >= held[0]) & (ids < held[1]), ids - held[0], -1)
        ctx.save_for_backward(local)
        return around.leave.forward(F.embedding(local.clamp(min=0), weight).masked_fill_((local < 0).unsqueeze(-1), 0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (saved,) = ctx.saved_tensors
        around: Around = ctx.around
        at: OpContext = ctx.at
        module, split = ctx.module, at.vocabulary is not None

        def rows() -> None:
            dy, local = around.leave.backward(grads[0])[0], saved
            if split:
                dy, local = dy.masked_fill((local < 0).unsqueeze(-1), 0), local.clamp(min=0)
            grad_slot(module.weight).add_rows(local.flatten(), as_rows(dy))

        at.weights.add(at.unit, rows, saved, grads[0])
        return None, None, None, None, None


def linears(module: Linears, at: OpContext) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Several maps of one input."""
    names, maps = zip(*module.named_children(), strict=True)
    return _maps(list(maps), at.around(names[0]), at)


def linear(module: Linear, at: OpContext) -> Callable[[Tensor], Tensor]:
    """One map."""
    run = _maps([module], at.around(), at)
    return lambda x: run(x)[0]


def tied_linear(module: TiedLinear, at: OpContext) -> Callable[[Tensor], Tensor]:
    """The map whose weight is the table of tokens."""
    run = _maps([module], at.arounds.get("vocab", Around()), at)
    return lambda x: run(x)[0]


def _maps(maps: list[Any], around: Around, at: OpContext) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = _Linear.apply(around, at, maps, x, *(m.weight for m in maps))  # type: ignore[no-untyped-call]
        return out

    return forward


def lookup(module: Lookup, at: OpContext) -> Callable[[Tensor], Tensor]:
    """A lookup in the table of tokens."""
    around = at.arounds.get("lookup", Around())
    return lambda ids: _Lookup.apply(around, at, module, ids, module.weight)  # type: ignore[no-untyped-call]
