"""A block as generation computes it: as few operations as there can be, each on all tokens of a turn.

What a token needs besides its products takes a microsecond here and there: a call of a module, a view, a launch. So
a block is one function over the forwards of its parts, as `maps.py` has made them; queries, keys and values stay
together from their product to the cache; and what all blocks need alike is made once a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.decoder import Batch
from shardwise.decoder.attention import Attention, Rope
from shardwise.decoder.gpt import MLP, GPTBlock
from shardwise.decoder.llama import GatedMLP, LlamaBlock
from shardwise.decoder.modules import RMSNorm
from shardwise.serving.attention import PagedCache, Rows
from shardwise.serving.products import Product

Forward = Callable[[Tensor, Batch], Tensor]


def block_forward(block: LlamaBlock | GPTBlock) -> Forward:
    """x + attention(norm(x)), then x + mlp(norm(x)), or both of the same x. x: [1, T, hidden]."""
    first, attention = block.attention_norm.forward, block.attention.forward
    second, mlp = block.mlp_norm.forward, block.mlp.forward
    parallel = isinstance(block, GPTBlock) and block.parallel_residual

    def forward(x: Tensor, batch: Batch) -> Tensor:
        after: Tensor = attention(first(x), batch).add_(x)
        out: Tensor = mlp(second(x if parallel else after)).add_(after)
        return out

    return forward


def attention_forward(attention: Attention, cache: PagedCache) -> Forward:
    """[1, T, hidden] -> the same. `attention.qkv` returns queries, keys and values side by side."""
    qkv, out = cast(Product, attention.qkv.forward), attention.out.forward
    width, kv = attention.head_dim, cache.heads
    norms = None
    if attention.q_norm is not None and attention.k_norm is not None:
        norms = attention.q_norm.forward, attention.k_norm.forward
    turn = _turned(attention.rope, width, kv) if attention.rope is not None else None

    def forward(x: Tensor, batch: Batch) -> Tensor:
        assert isinstance(batch, Rows)
        y = qkv(x)
        heads = y.view(y.shape[1], -1, width)
        if norms is not None:
            q, k = norms[0](heads[:, : -2 * kv]), norms[1](heads[:, -2 * kv : -kv])
            heads = torch.cat((q, k, heads[:, -kv:]), 1)
        if turn is not None:
            heads = turn(heads, batch)
        found: Tensor = out(cache.attend(heads, batch)[None])
        return found

    return forward


def _turned(rope: Rope, width: int, kv: int) -> Forward:
    """Of heads [T, H + 2 K, D] the pairs (i, i + r/2) of the first r numbers turned by the angles of their positions.

    Values, the last K heads, and the numbers from r on are turned by no angle, so that everything is done at once.
    """

    def tables(heads: Tensor, batch: Batch) -> tuple[int, Tensor, Tensor]:
        cos, sin = (table[0] for table in rope.tables(batch.positions, heads.dtype))
        half = cos.shape[-1]
        same, other = torch.ones_like(heads), torch.zeros_like(heads)
        same[:, :-kv, : 2 * half] = torch.cat((cos, cos), -1)
        other[:, :-kv, : 2 * half] = torch.cat((-sin, sin), -1)
        return half, same, other

    def forward(heads: Tensor, batch: Batch) -> Tensor:
        half, same, other = batch.shared("rope", lambda: tables(heads, batch))
        if 2 * half == width:
            partners = heads.roll(half, -1)
        else:
            partners = torch.cat((heads[..., half : 2 * half], heads[..., :half], heads[..., 2 * half :]), -1)
        return (heads * same).addcmul_(partners, other)

    return forward


def gated_mlp_forward(mlp: GatedMLP) -> Product:
    """`mlp.gate_up` returns both side by side."""
    gate_up, down = cast(Product, mlp.gate_up.forward), mlp.down.forward

    def forward(x: Tensor) -> Tensor:
        gate, up = gate_up(x).chunk(2, -1)
        out: Tensor = down(F.silu(gate).mul_(up))
        return out

    return forward


def mlp_forward(mlp: MLP) -> Product:
    up, down, approximate = cast(Product, mlp.up.forward), mlp.down.forward, mlp.approximate
    return lambda x: down(F.gelu(up(x), approximate=approximate))


def rms_norm_forward(norm: RMSNorm, stays: bool) -> Product:
    """On CPUs the layer norm of x beside -x, whose mean is 0 and whose variance is x's mean square: torch has one
    kernel for that, and makes its own `rms_norm` of seven. stays: the weight will not change."""
    eps, width = norm.eps, len(norm.weight)
    twice = torch.cat((norm.weight, norm.weight)).detach() if stays else None

    def mirrored(x: Tensor) -> Tensor:
        weight = torch.cat((norm.weight, norm.weight)) if twice is None else twice
        return torch.layer_norm(torch.cat((x, x.neg()), -1), (2 * width,), weight, None, eps)[..., :width]

    def plain(x: Tensor) -> Tensor:
        return F.rms_norm(x, norm.weight.shape, norm.weight, eps)

    return mirrored if norm.weight.device.type == "cpu" else plain
