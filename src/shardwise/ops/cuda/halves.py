"""A Llama block in two functions (`llama_halves.py`) with kernels of CUDA.

Elementwise kernels there read and write vectors only of contiguous tensors, so gate and up are computed apart, one
behind the other, where a CPU makes one product of both. Queries, keys and values stay one product; rotation writes a
copy of it, since in place it would take more passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.decoder import Batch
from shardwise.decoder.blocks import LlamaBlock
from shardwise.decoder.modules import GatedMLP, Linears, RMSNorm
from shardwise.ops.context import LOCAL, OpContext
from shardwise.ops.cuda.norm import norm_backward, norm_forward
from shardwise.ops.cuda.rotary import Tables, rotate_into
from shardwise.ops.gradients import grad_slot
from shardwise.ops.linear import as_rows
from shardwise.ops.llama_halves import BlockHalves, llama_halves
from shardwise.ops.recompute import computes_again


class StackedMaps:
    """Maps of one input with equally many outputs, each one's contiguous: [maps, B S, out]."""

    def __init__(self, linears: Linears, at: OpContext, name: str) -> None:
        self.maps, self.at = linears.maps, at
        first, _ = next(linears.named_children())
        self.enter = at.around(f"{name}.{first}").enter
        self._weights = [module.weight.detach() for module in self.maps]

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S or S / tp, in], not yet gathered."""
        rows = as_rows(self.enter.forward(x))
        y = rows.new_empty(len(self.maps), len(rows), len(self._weights[0]))
        for module, weight, out in zip(self.maps, self._weights, y, strict=True):
            torch.mm(rows, weight.t(), out=out)
            if module.bias is not None:
                out += module.bias.detach()
        return y

    def backward(self, x: Tensor, dy: Tensor) -> Tensor:
        """The gradient of x; those of the weights are added where they stay, now or later. dy: [maps, B S, out]."""
        rows = torch.mm(dy[0], self._weights[0])
        for part, weight in zip(dy[1:], self._weights[1:], strict=True):
            rows.addmm_(part, weight)
        dx, pending = self.enter.backward(rows.view(len(x), -1, x.shape[2]))
        self.at.weights.add(self.at.unit, lambda: self._add_products(dy, as_rows(self.enter.forward(x))), x, dy)
        for module, part in zip(self.maps, dy, strict=True):
            if module.bias is not None:
                grad_slot(module.bias).add_sum(part)
        pending.wait()
        return dx

    def _add_products(self, dy: Tensor, x: Tensor) -> None:
        for module, part in zip(self.maps, dy, strict=True):
            grad_slot(module.weight).add_product(part.t(), x)


class CudaHalves(BlockHalves):
    """Kernels of CUDA for the functions of one block."""

    def __init__(self, block: LlamaBlock, at: OpContext) -> None:
        super().__init__(block, at)
        assert isinstance(block.mlp, GatedMLP)
        self.gate_up = StackedMaps(block.mlp.gate_up, at, "mlp.gate_up")

    def norm(self, norm: RMSNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        return norm_forward(x, norm)

    def norm_backward(self, norm: RMSNorm, dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
        dx, dw = norm_backward(dy, x, rstd, norm)
        grad_slot(norm.weight).add(dw)
        return dx

    def rotated(self, y: Tensor, tables: Tables) -> Tensor:
        turned, out = sum(self.heads[:2]), torch.empty_like(y)
        _rotate(out[:, :, :turned], y[:, :, :turned], tables, back=False)
        out[:, :, turned:].copy_(y[:, :, turned:])
        return out

    def turned_back(self, grads: Sequence[Tensor], tables: Tables) -> Tensor:
        first = grads[0]
        dy = first.new_empty(*first.shape[:2], sum(self.heads), first.shape[3])
        dq, dk, dv = dy.split(self.heads, 2)
        for into, grad in zip((dq, dk), grads, strict=False):  # values do not turn
            _rotate(into, grad, tables, back=True)
        dv.copy_(grads[2])
        return dy

    def gate_and_up(self, y: Tensor) -> tuple[Tensor, ...]:
        return y.unbind()

    def project_down(self, product: Tensor, residual: Tensor) -> Tensor:
        if computes_again() and self.down.leave is LOCAL:
            return residual.new_empty(()).expand(residual.shape)  # its output is not read again
        return self.down.forward(product, residual)


def _rotate(out: Tensor, x: Tensor, tables: Tables, back: bool) -> None:
    """Rotate as many numbers of each head as the tables have, and copy the others."""
    width = tables[0].shape[-1]
    rotate_into(out[..., :width], x[..., :width], tables, back)
    if width < x.shape[-1]:
        out[..., width:].copy_(x[..., width:])


def cuda_halves(block: LlamaBlock, at: OpContext) -> Callable[[Tensor, Batch], Tensor]:
    """A block in two functions around its attention's core, with kernels of CUDA."""
    return llama_halves(block, at, CudaHalves)
