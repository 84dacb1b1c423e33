"""Linear maps of a block by hand, forward and backward: several of one input as one product, and row-parallel ones.

The weights of several maps of one input are adjacent in their unit's flat buffer, and so are their gradients: one
product in place of two or three has fewer calls, larger operands, and no sums of the input's gradients between them.
Communication is as in `linear.py`; these are its counterparts without autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.decoder.modules import Linear, Linears
from shardwise.ops.context import OpContext
from shardwise.ops.gradients import GradSlot, grad_slot
from shardwise.ops.linear import add_bias, as_rows


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
    def of(cls, linears: Linears, at: OpContext, name: str) -> FusedLinear:
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
