"""Linear maps and lookups of a training step, their weights' gradients written where they stay.

One function serves every cut: what is communicated before and after the product is the map's `Around`. Under sequence
parallelism an input is gathered again in backward, so that only the shard is saved.

A low-rank adapter is part of its map: it reads the same input and adds to the output before that is communicated, so
that it needs no communication of its own. Its inner product is computed again in backward. A map without trained
weights saves no input.

Products with a frozen matrix in fewer bits: its rows are converted to the precision of the inputs block by block.
Forward and backward multiply with the same converted numbers.

Linear maps of a block by hand, forward and backward: several of one input as one product, and row-parallel ones.

The weights of several maps of one input are adjacent in their unit's flat buffer, and so are their gradients: one
product in place of two or three has fewer calls, larger operands, and no sums of the input's gradients between them.
Communication is as in `linear.py`; these are its counterparts without autograd.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder import Batch
from shardwise.decoder.attention import SharedKey
from shardwise.decoder.bases import FrozenBase
from shardwise.decoder.decoder import Head
from shardwise.decoder.modules import Adapted, Linear, Linears, Lookup, TiedLinear
from shardwise.ops.context import Around, Exchange, OpContext
from shardwise.ops.gradients import GradSlot, grad_slot
from shardwise.ops.limits import dense_rows


def narrow_linear(x: Tensor, base: FrozenBase, numbers: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b. x: [..., in]; numbers, scales: of W, as `base` says."""
    rows = x.reshape(-1, x.shape[-1])
    y = rows.new_empty(len(rows), len(numbers))
    step = dense_rows(len(numbers), rows.shape[1])
    for start in range(0, len(numbers), step):
        dense = base.dense(numbers, scales, x.dtype, start, start + step)
        torch.mm(rows, dense.t(), out=y[:, start : start + step])
        del dense  # before the next one is made
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], -1)


def narrow_input_gradient(
    dy: Tensor, base: FrozenBase, numbers: Tensor, scales: Tensor, dx: Tensor | None = None
) -> Tensor:
    """dy W [T, in], added to `dx` where that is given. dy: [T, out]."""
    step = dense_rows(len(numbers), base.columns(numbers))
    for start in range(0, len(numbers), step):
        dense, columns = base.dense(numbers, scales, dy.dtype, start, start + step), dy[:, start : start + step]
        dx = columns @ dense if dx is None else dx.addmm_(columns, dense)
        del dense
    assert dx is not None
    return dx


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
        return [module for module in self.modules if isinstance(module, Adapted)]

    @property
    def trains(self) -> bool:
        return any(module.weight.requires_grad or isinstance(module, Adapted) for module in self.modules)

    def matrix(self, weight: Tensor) -> Tensor:
        """A weight as [outputs, inputs]."""
        return weight.t() if self.transposed else weight

    def product(self, module: Map, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Outputs [..., out] of a map."""
        stored = _stored(module)
        y = narrow_linear(x, stored[0], weight, stored[1], bias) if stored else F.linear(x, self.matrix(weight), bias)
        if isinstance(module, Adapted):
            a, b = module.factors
            as_rows(y).addmm_(as_rows(x) @ a.t(), b.t(), alpha=module.scale)
        return y

    def input_gradient(self, module: Map, dy: Tensor, weight: Tensor, dx: Tensor | None) -> Tensor:
        """The gradient of a map's input [T, in] from that of its outputs, added to `dx` where that is given."""
        if stored := _stored(module):
            return narrow_input_gradient(dy, stored[0], weight, stored[1], dx)
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


def _stored(module: Map) -> tuple[FrozenBase, Tensor] | None:
    """How a weight in fewer bits is stored, and its scales."""
    base = getattr(module, "frozen_base", None)
    return base and (base, module.get_parameter("weight_scale"))


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


def linears(module: Linears, at: OpContext) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return _Maps(module.maps, [at.around(name) for name, _ in module.named_children()], at)


def linear(module: Linear, at: OpContext, transposed: bool = False) -> Callable[[Tensor], Tensor]:
    """One map. transposed: whether its weight is [inputs, outputs]."""
    run = _Maps([module], [at.around()], at, transposed)
    return lambda x: run(x)[0]


def tied_linear(module: TiedLinear, at: OpContext) -> Callable[[Tensor], Tensor]:
    run = _Maps([module], [at.arounds.get("vocab", Around())], at)
    return lambda x: run(x)[0]


def shared_key(module: SharedKey, at: OpContext) -> Callable[[Tensor], Tensor]:
    """The identity where every head is at hand; over ranks with some heads each, the communication."""
    leave = at.arounds.get("shared key", Around()).leave
    return lambda x: Exchange.apply(leave, x)  # type: ignore[no-untyped-call]


def lookup(module: Lookup, at: OpContext) -> Callable[[Tensor], Tensor]:
    around = at.arounds.get("lookup", Around())
    return lambda ids: _Lookup.apply(around, at, module, ids, module.weight)  # type: ignore[no-untyped-call]


def end_to_end(tensors: Sequence[Tensor]) -> Tensor | None:
    """One tensor on the memory of several that lie one behind the other, with a version counter of its own; None where
    they do not."""
    first = tensors[0]
    storage, at = first.untyped_storage(), first.storage_offset()
    for tensor in tensors:
        if tensor.untyped_storage()._cdata != storage._cdata or tensor.storage_offset() != at:
            return None
        if not tensor.is_contiguous() or tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:]:
            return None
        at += tensor.numel()
    own = torch.empty(0, dtype=first.dtype, device=first.device)
    own.set_(storage, first.storage_offset(), (sum(map(len, tensors)), *first.shape[1:]), first.stride())
    return own


class FusedLinear:
    """Linear maps of one input whose weights are adjacent in memory, as one product. weight: [all rows, in]; bias: [all
    rows] or None."""

    def __init__(self, maps: Sequence[Linear], weight: Tensor, bias: Tensor | None, at: OpContext, name: str) -> None:
        self.maps, self.weight, self.bias, self.at = maps, weight, bias, at
        self.enter = at.around(name).enter
        self.rows = [len(m.weight) for m in maps]
        self._transposed = weight.t()
        self._gradient: Tensor | None = None

    @classmethod
    def of(cls, linears: Linears, at: OpContext, name: str) -> Self:
        """The maps of `linears`, whose weights are adjacent. name: in the module that `at` is about."""
        names = [child for child, _ in linears.named_children()]
        maps = linears.maps
        weight = end_to_end([m.weight.detach() for m in maps])
        biases = [m.bias.detach() for m in maps if m.bias is not None]
        bias = end_to_end(biases) if biases else None
        assert weight is not None and (bias is not None or not biases), "the plan lays the weights end to end"
        return cls(maps, weight, bias, at, f"{name}.{names[0]}")

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S or S / tp, in], not yet gathered -> [B S, all rows]."""
        y = torch.mm(as_rows(self.enter.forward(x)), self._transposed)
        if self.bias is not None:
            y += self.bias
        return y

    def backward(self, x: Tensor, dy: Tensor) -> Tensor:
        """The gradient of x; those of the weights are added where they stay, now or later.

        x: [B, S or S / tp, in], not yet gathered; dy: [B S, all rows].
        """
        dx, pending = self.enter.backward(torch.mm(dy, self.weight).view(len(x), -1, x.shape[2]))
        self.at.weights.add(self.at.unit, lambda: self._add_product(dy, as_rows(self.enter.forward(x))), x, dy)
        if self.bias is not None:
            for module, part in zip(self.maps, dy.split(self.rows, 1), strict=True):
                add_bias(module, part)
        pending.wait()
        return dx

    def _add_product(self, dy: Tensor, x: Tensor) -> None:
        places = [grad_slot(m.weight) for m in self.maps]
        if self._gradient is None:
            self._gradient = end_to_end([place.view for place in places])
            assert self._gradient is not None, "gradients lie as their weights do"
        whole = GradSlot(self._gradient)
        whole.empty = places[0].empty
        whole.add_product(dy.t(), x)
        for place in places:
            place.empty = False


class RowParallel:
    """A row-parallel map without bias, whose sum over ranks is added to the residual stream."""

    def __init__(self, module: Linear, at: OpContext, name: str) -> None:
        self.at, self.module, self.leave = at, module, at.around(name).leave
        self._weight = module.weight.detach()
        self._transposed = self._weight.t()

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x: [B S, in]; residual: [B, S or S / tp, out]; returns the latter's shape."""
        y = torch.mm(x, self._transposed).view(len(residual), -1, residual.shape[2])
        return self.leave.forward(y).add_(residual)

    def backward(self, x: Tensor, dy: Tensor) -> Tensor:
        """The gradient of x; that of the weight is added where it stays, now or later. dy: [B, S or S / tp, out]."""
        x = x.detach()  # without the graph that made it, which would outlive its backward
        rows = as_rows(self.leave.backward(dy)[0])
        place = grad_slot(self.module.weight)
        self.at.weights.add(self.at.unit, lambda: place.add_product(rows.t(), x), x, rows)
        return torch.mm(rows, self._weight)


def uncapped_head(head: Head, at: OpContext) -> Callable[[Tensor, Batch], Tensor] | None:
    return (lambda x, batch: head.uncapped(x)) if head.softcap else None
