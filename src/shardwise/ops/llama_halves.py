"""A Llama block in two functions: what comes before its attention's core, and what comes after it.

With few tokens in a micro-batch a third of a step is not arithmetic but calls: of operators, of autograd's nodes, of
memory (docs/decisions.md). So norm, projections and rotation are one function with a backward of its own, and so is
all that follows attention. The same bytes are saved as where the decoder's modules compute one by one
(`predict/memory/activations.py`), which they do wherever this cannot: with dropout, norms of heads, and weights that do
not lie end to end (`fusion.py`).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder import Batch
from shardwise.decoder.attention import Attention, rotate
from shardwise.decoder.blocks import LlamaBlock
from shardwise.decoder.modules import GatedMLP, RMSNorm, rms_norm, rms_norm_backward
from shardwise.ops.context import OpContext
from shardwise.ops.gradients import grad_slot
from shardwise.ops.linear import FusedLinear, RowParallel

Tables = tuple[Tensor, Tensor]
"""Tables of `Rope.whole`."""


class GateUp(Protocol):
    """The two first maps of the feed-forward part, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S or S / tp, in], not yet gathered; returns gate and up of all tokens, in the form's own layout."""

    def backward(self, x: Tensor, dy: Tensor) -> Tensor:
        """The gradient of x; those of the weights are added where they stay. dy: as `forward` returns."""


class BlockHalves:
    """Constants and kernels of the functions of one block. A device with other kernels has a subclass."""

    def __init__(self, block: LlamaBlock, at: OpContext) -> None:
        attention = block.attention
        assert isinstance(attention, Attention) and isinstance(block.mlp, GatedMLP)
        self.qkv = FusedLinear.of(attention.qkv, at, "attention.qkv")
        self.gate_up: GateUp = FusedLinear.of(block.mlp.gate_up, at, "mlp.gate_up")
        self.heads = [rows // attention.head_dim for rows in self.qkv.rows]
        self.norms = block.attention_norm, block.mlp_norm
        self.out = RowParallel(attention.out, at, "attention.out")
        self.down = RowParallel(block.mlp.down, at, "mlp.down")

    def norm(self, norm: RMSNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x), 1/rms)."""
        return rms_norm(x, norm.weight, norm.eps)

    def norm_backward(self, norm: RMSNorm, dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
        """The gradient of x; that of the weight is added where it stays."""
        dx, dw = rms_norm_backward(dy, x, rstd, norm.weight)
        grad_slot(norm.weight).add(dw)
        return dx

    def rotated(self, y: Tensor, tables: Tables) -> Tensor:
        """y [B, S, heads, D] with queries and keys rotated, y itself if that is possible."""
        rotate(y[:, :, : -self.heads[2]], tables)
        return y

    def turned_back(self, grads: Sequence[Tensor], tables: Tables) -> Tensor:
        """The gradient of what `rotated` was given, from those of queries, keys and values."""
        dy = _side_by_side(grads)
        rotate(dy[:, :, : -self.heads[2]], tables, back=True)
        return dy

    def gate_and_up(self, y: Tensor) -> tuple[Tensor, ...]:
        """Views of an output of `gate_up`."""
        return y.chunk(2, 1)

    def project_down(self, product: Tensor, residual: Tensor) -> Tensor:
        return self.down.forward(product, residual)


class _Before(torch.autograd.Function):
    """Queries, keys and values of norm(x), rotated. Saves x, 1/rms and norm(x)."""

    @staticmethod
    def forward(ctx: Any, parts: BlockHalves, tables: Tables, x: Tensor) -> tuple[Tensor, ...]:
        normed, rstd = parts.norm(parts.norms[0], x)
        y = parts.rotated(parts.qkv.forward(normed).view(*tables[0].shape[:2], sum(parts.heads), -1), tables)
        ctx.parts, ctx.tables = parts, tables
        ctx.save_for_backward(x, rstd, normed)
        return y.split(parts.heads, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, rstd, normed = _taken(ctx)
        parts: BlockHalves = ctx.parts
        dy = parts.turned_back(grads, ctx.tables)
        dnormed = parts.qkv.backward(normed, dy.view(-1, parts.qkv.weight.shape[0]))
        del dy, normed
        return None, None, parts.norm_backward(parts.norms[0], dnormed, x, rstd)


class _After(torch.autograd.Function):
    """x' = x + out(attended), then x' + down(silu(gate) * up) of norm(x').

    Saves what attention has found, x', 1/rms, norm(x'), gate and up, silu(gate) and its product with up.
    """

    @staticmethod
    def forward(ctx: Any, parts: BlockHalves, attended: Tensor, x: Tensor) -> Tensor:
        ctx.parts, ctx.shape = parts, attended.shape
        attended = attended.reshape(-1, attended.shape[2] * attended.shape[3])
        x = parts.out.forward(attended, x)
        normed, rstd = parts.norm(parts.norms[1], x)
        y = parts.gate_up.forward(normed)
        gate, up = parts.gate_and_up(y)
        silu = F.silu(gate)
        product = silu * up
        ctx.save_for_backward(attended, x, rstd, normed, y, silu, product)
        return parts.project_down(product, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        attended, x, rstd, normed, y, silu, product = _taken(ctx)
        parts: BlockHalves = ctx.parts
        inner = parts.down.backward(product, grads[0])
        del product
        dy = _gate_backward(parts, inner, y, silu)
        del inner, y, silu
        dnormed = parts.gate_up.backward(normed, dy)
        del dy, normed
        dx = parts.norm_backward(parts.norms[1], dnormed, x, rstd).add_(grads[0])
        return None, parts.out.backward(attended, dx).view(ctx.shape), dx


def _taken(ctx: Any) -> tuple[Tensor, ...]:
    """The saved tensors. Autograd releases them, so that each is freed after its last use."""
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()
    return saved


def _gate_backward(parts: BlockHalves, grad: Tensor, y: Tensor, silu: Tensor) -> Tensor:
    """The gradients of gate and up, laid out as these are in y, from that of silu(gate) * up."""
    gate, up = parts.gate_and_up(y)
    dy = torch.empty_like(y)
    dgate, dup = parts.gate_and_up(dy)
    torch.mul(grad, silu, out=dup)
    torch.mul(grad, up, out=dgate)
    torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
    return dy


def _side_by_side(grads: Sequence[Tensor]) -> Tensor:
    """Gradients of queries, keys and values [B, S, heads, D] as one tensor: the one that attention's backward has made
    them in (`ops/cpu/attention.py`), or a copy where they are apart."""
    whole = grads[0]._base
    heads = sum(each.shape[2] for each in grads)
    if whole is not None and whole.dim() == 4 and whole.shape[2] == heads and whole.is_contiguous():
        parts = whole.split([each.shape[2] for each in grads], 2)
        if all(_same_memory(a, b) for a, b in zip(parts, grads, strict=True)):
            return whole
    return torch.cat(tuple(grads), 2)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are the same view of one storage. Unlike an address, a fake tensor has both."""
    storages = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return storages and a.storage_offset() == b.storage_offset() and a.stride() == b.stride()


def llama_halves(
    block: LlamaBlock, at: OpContext, kernels: type[BlockHalves] = BlockHalves
) -> Callable[[Tensor, Batch], Tensor]:
    """A block in two functions around its attention's core. kernels: those of the device."""
    rope, core = block.attention.rope, block.attention.core
    assert rope is not None

    @cache
    def parts() -> BlockHalves:
        return kernels(block, at)

    def forward(x: Tensor, batch: Batch) -> Tensor:
        found = parts()
        q, k, v = _Before.apply(found, rope.shared(batch, x.dtype), x)  # type: ignore[no-untyped-call]
        out: Tensor = _After.apply(found, core(q, k, v, batch), x)  # type: ignore[no-untyped-call]
        return out

    return forward
