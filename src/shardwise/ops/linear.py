"""Linear maps and lookups of a training step, their weights' gradients written where they stay.

One function serves every cut: what is communicated before and after the product is the map's `Around`. Under sequence
parallelism an input is gathered again in backward, so that only the shard is saved.

A low-rank adapter is part of its map: it reads the same input and adds to the output before that is communicated, so
that it needs no communication of its own. Its inner product is computed again in backward. A map without trained
weights saves no input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder.adapters import Adapted
from shardwise.decoder.latent_attention import SharedKey
from shardwise.decoder.modules import Linear, Linears, Lookup, TiedLinear
from shardwise.ops.context import Around, OpContext
from shardwise.ops.gradients import grad_slot
from shardwise.ops.int8 import int8_input_gradient, int8_linear

Map = Linear | TiedLinear


def as_rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


class _Maps:
    """Maps of one input, with the communication around them."""

    def __init__(
        self, modules: Sequence[Map], arounds: Sequence[Around], at: OpContext, transposed: bool = False
    ) -> None:
        self.modules, self.unit, self.later, self.transposed = modules, at.unit, at.weights, transposed
        self.enter, self.late_bias = arounds[0].enter, arounds[0].late_bias
        self.leaves = [around.leave for around in arounds]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        weights = (*(m.weight for m in self.modules), *(factor for m in self.adapted for factor in m.factors))
        out: tuple[Tensor, ...] = _Linear.apply(self, x, *weights)  # type: ignore[no-untyped-call]
        return out

    @property
    def adapted(self) -> list[Adapted]:
        """The maps with adapters."""
        return [module for module in self.modules if isinstance(module, Adapted)]

    @property
    def trains(self) -> bool:
        """Whether gradients of weights are computed."""
        return any(module.weight.requires_grad or isinstance(module, Adapted) for module in self.modules)

    def matrix(self, weight: Tensor) -> Tensor:
        """A weight as [outputs, inputs]."""
        return weight.t() if self.transposed else weight

    def product(self, module: Map, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Outputs [..., out] of a map."""
        scales = _scales(module)
        y = F.linear(x, self.matrix(weight), bias) if scales is None else int8_linear(x, weight, scales, bias)
        if isinstance(module, Adapted):
            a, b = module.factors
            as_rows(y).addmm_(as_rows(x) @ a.t(), b.t(), alpha=module.scale)
        return y

    def input_gradient(self, module: Map, dy: Tensor, weight: Tensor, dx: Tensor | None) -> Tensor:
        """The gradient of a map's input [T, in] from that of its outputs, added to `dx` where that is given."""
        if (scales := _scales(module)) is not None:
            return int8_input_gradient(dy, weight, scales, dx)
        matrix = self.matrix(weight)
        return dy @ matrix if dx is None else dx.addmm_(dy, matrix)

    def add_product(self, module: Map, dy: Tensor, columns: Tensor) -> None:
        """Add the gradients of a map's weights from those of its outputs [T, out] and from its inputs [T, in]."""
        if module.weight.requires_grad:
            pair = (columns, dy) if self.transposed else (dy, columns)
            grad_slot(module.weight).add_product(pair[0].t(), pair[1])
        if isinstance(module, Adapted):
            a, b = module.factors
            grad_slot(b).add_product(dy.t(), (columns @ a.t()).mul_(module.scale))
            grad_slot(a).add_product((dy @ b).mul_(module.scale).t(), columns)


def _scales(module: Map) -> Tensor | None:
    """Scales of a weight in 8 bits."""
    return getattr(module, "weight_scale", None)


class _Linear(torch.autograd.Function):
    """(y_1, y_2, ...) = x (W_1, W_2, ...)^T for the local part of each W. Saves the local x where gradients of weights
    need it."""

    @staticmethod
    def forward(ctx: Any, maps: _Maps, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        full = maps.enter.forward(x)
        ctx.maps = maps
        ctx.save_for_backward(x if maps.trains else None, *weights)
        parts = zip(maps.modules, maps.leaves, weights, strict=False)  # factors of adapters follow
        if maps.late_bias:
            ys = ((m.bias, leave.forward(maps.product(m, full, w, None))) for m, leave, w in parts)
            return tuple(y if bias is None else y.add_(bias) for bias, y in ys)
        return tuple(leave.forward(maps.product(m, full, w, m.bias)) for m, leave, w in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        maps: _Maps = ctx.maps
        local = [leave.backward(dy)[0] for leave, dy in zip(maps.leaves, grads, strict=True)]
        dys = [as_rows(dy) for dy in local]
        dx = None
        for module, dy, weight in zip(maps.modules, dys, weights, strict=False):  # factors of adapters follow
            dx = maps.input_gradient(module, dy, weight, dx)
        assert dx is not None
        for module, dy in zip(maps.modules, dys, strict=True):
            if isinstance(module, Adapted):
                a, b = module.factors
                dx.addmm_(dy @ b, a, alpha=module.scale)
        dx, pending = maps.enter.backward(dx.view(*local[0].shape[:-1], -1))
        del local
        if x is not None:
            inputs = x.detach()  # without the graph that made it, which would outlive its backward

            def products() -> None:
                columns = as_rows(maps.enter.forward(inputs))
                for module, dy in zip(maps.modules, dys, strict=True):
                    maps.add_product(module, dy, columns)

            maps.later.add(maps.unit, products, inputs, *dys)
        for module, dy in zip(maps.modules, grads if maps.late_bias else dys, strict=True):
            add_bias(module, as_rows(dy))
        pending.wait()
        return (None, dx, *[None] * len(weights))


def add_bias(module: Map, dy: Tensor) -> None:
    """dy: [T, out]."""
    if module.bias is not None and module.bias.requires_grad:
        grad_slot(module.bias).add_sum(dy)


class _Lookup(torch.autograd.Function):
    """Rows `at.vocabulary` of a table: the others are zero, and what leaves is the sum."""

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


class _SharedKey(torch.autograd.Function):
    """The keys' shared part for the heads of every rank. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, around: Around, x: Tensor) -> Tensor:
        ctx.around = around
        return around.leave.forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        around: Around = ctx.around
        grad, pending = around.leave.backward(grads[0].contiguous())
        pending.wait()
        return None, grad


def linears(module: Linears, at: OpContext) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Several maps of one input."""
    return _Maps(module.maps, [at.around(name) for name, _ in module.named_children()], at)


def linear(module: Linear, at: OpContext, transposed: bool = False) -> Callable[[Tensor], Tensor]:
    """One map. transposed: whether its weight is [inputs, outputs]."""
    run = _Maps([module], [at.around()], at, transposed)
    return lambda x: run(x)[0]


def tied_linear(module: TiedLinear, at: OpContext) -> Callable[[Tensor], Tensor]:
    """The map whose weight is the table of tokens."""
    run = _Maps([module], [at.arounds.get("vocab", Around())], at)
    return lambda x: run(x)[0]


def shared_key(module: SharedKey, at: OpContext) -> Callable[[Tensor], Tensor]:
    """The identity where every head is at hand; over ranks with some heads each, the communication."""
    around = at.arounds.get("shared key", Around())
    return lambda x: _SharedKey.apply(around, x)  # type: ignore[no-untyped-call]


def lookup(module: Lookup, at: OpContext) -> Callable[[Tensor], Tensor]:
    """A lookup in the table of tokens."""
    around = at.arounds.get("lookup", Around())
    return lambda ids: _Lookup.apply(around, at, module, ids, module.weight)  # type: ignore[no-untyped-call]
