"""Every parameter of a model: its global name, shape, how it starts and whether weight decay touches it.

This list is the ground truth. The decoder's modules must produce exactly these names and shapes (a test holds them to
it), the layout places these tensors on ranks, the checkpoint stores them under these names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwise.model.config import ModelConfig


@dataclass(frozen=True)
class Parameter:
    """One parameter tensor. `part` is the piece of the decoder that holds it: embedding, blocks.<i> or head."""

    name: str
    shape: tuple[int, ...]
    part: str
    init: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.02

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decay(self) -> bool:
        """Weight decay touches matrices; norm weights and biases are left alone (GPT-2, Llama practice)."""
        return len(self.shape) > 1


def parts(config: ModelConfig) -> list[str]:
    """The pieces of the decoder in the order in which a token passes through them."""
    return ["embedding", *(f"blocks.{i}" for i in range(config.layers)), "head"]


def parameters(config: ModelConfig) -> list[Parameter]:
    """All parameters, part by part. A tied model has no `head.out.weight`: the head uses `embedding.tokens.weight`."""
    return [parameter for part in parts(config) for parameter in part_parameters(config, part)]


def part_parameters(config: ModelConfig, part: str) -> list[Parameter]:
    """The parameters of one part: "embedding", "blocks.<i>" or "head"."""
    if part == "embedding":
        return list(_embedding(config))
    if part == "head":
        return list(_head(config))
    return list(_block(config, int(part.removeprefix("blocks."))))


def count(config: ModelConfig) -> int:
    """Number of parameters, tied ones once."""
    return count_parts(config)[0]


def count_parts(config: ModelConfig) -> tuple[int, int, int]:
    """(all, blocks, active for one token): `blocks` leaves out embedding, final norm and head."""
    blocks = sum(times * sum(p.numel for p in _block(config, i)) for i, times in block_kinds(config).items())
    edges = sum(p.numel for part in ("embedding", "head") for p in part_parameters(config, part))
    idle = 0
    if config.experts:
        e = config.experts
        one = sum(p.numel for p in _mlp(config, "expert", e.ffn, "expert", 0.0))
        idle = max(0, config.layers - e.dense_layers) * (e.count - e.active) * one
    return blocks + edges, blocks, blocks + edges - idle


def block_kinds(config: ModelConfig) -> dict[int, int]:
    """Index of a representative block -> how many blocks have its shapes.

    Blocks come in at most two shapes; whoever sums over each once spends as little on a 1T model as on a small one.
    """
    dense = min(config.experts.dense_layers, config.layers) if config.experts else 0
    kinds = {0: dense, dense: config.layers - dense} if dense else {0: config.layers}
    return {index: times for index, times in kinds.items() if times}


def _embedding(c: ModelConfig) -> Iterator[Parameter]:
    yield Parameter("embedding.tokens.weight", (c.vocab, c.hidden), "embedding")
    if c.positions == "learned":
        yield Parameter("embedding.positions", (c.max_positions, c.hidden), "embedding")
    if c.embedding_norm:
        yield from _norm(c, "embedding.norm", c.hidden, "embedding")


def _head(c: ModelConfig) -> Iterator[Parameter]:
    yield from _norm(c, "head.norm", c.hidden, "head")
    if not c.tied:
        yield Parameter("head.out.weight", (c.vocab, c.hidden), "head")


def _norm(c: ModelConfig, name: str, width: int, part: str) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (width,), part, init="ones")
    if c.norm == "layernorm":
        yield Parameter(f"{name}.bias", (width,), part, init="zeros")


def _linear(name: str, out: int, inp: int, part: str, bias: bool, std: float = 0.02) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (out, inp), part, std=std)
    if bias:
        yield Parameter(f"{name}.bias", (out,), part, init="zeros")


def _block(c: ModelConfig, index: int) -> Iterator[Parameter]:
    part = f"blocks.{index}"
    # Projections that write into the residual stream start smaller: its variance must not grow with depth (GPT-2).
    out_std = 0.02 / math.sqrt(2 * c.layers)
    yield from _norm(c, f"{part}.attention_norm", c.hidden, part)
    if c.latent_attention:
        yield from _latent_attention(c, part, out_std)
    else:
        qkv_bias = c.bias != "none"
        yield from _linear(f"{part}.attention.qkv.q", c.q_width, c.hidden, part, qkv_bias)
        yield from _linear(f"{part}.attention.qkv.k", c.kv_width, c.hidden, part, qkv_bias)
        yield from _linear(f"{part}.attention.qkv.v", c.kv_width, c.hidden, part, qkv_bias)
        if c.qk_norm:
            yield Parameter(f"{part}.attention.q_norm.weight", (c.head_dim,), part, init="ones")
            yield Parameter(f"{part}.attention.k_norm.weight", (c.head_dim,), part, init="ones")
        yield from _linear(f"{part}.attention.out", c.hidden, c.q_width, part, c.bias == "all", out_std)
    yield from _norm(c, f"{part}.mlp_norm", c.hidden, part)
    if c.experts and index >= c.experts.dense_layers:
        yield from _experts(c, part, out_std)
    else:
        yield from _mlp(c, f"{part}.mlp", c.ffn, part, out_std)


def _mlp(c: ModelConfig, name: str, width: int, part: str, out_std: float) -> Iterator[Parameter]:
    bias = c.bias == "all"
    if c.gated:
        yield from _linear(f"{name}.gate_up.gate", width, c.hidden, part, bias)
        yield from _linear(f"{name}.gate_up.up", width, c.hidden, part, bias)
    else:
        yield from _linear(f"{name}.up.up", width, c.hidden, part, bias)
    yield from _linear(f"{name}.down", c.hidden, width, part, bias, out_std)


def _experts(c: ModelConfig, part: str, out_std: float) -> Iterator[Parameter]:
    assert c.experts
    e = c.experts
    yield Parameter(f"{part}.mlp.router.weight", (e.count, c.hidden), part)
    if e.router_bias:
        yield Parameter(f"{part}.mlp.router.bias", (e.count,), part, init="zeros")
    for i in range(e.count):
        yield from _mlp(c, f"{part}.mlp.experts.{i}", e.ffn, part, out_std)
    for i in range(e.shared):
        yield from _mlp(c, f"{part}.mlp.shared.{i}", e.ffn, part, out_std)


def _latent_attention(c: ModelConfig, part: str, out_std: float) -> Iterator[Parameter]:
    assert c.latent_attention
    a, name = c.latent_attention, f"{part}.attention"
    q_head = a.nope_head_dim + a.rope_head_dim
    yield from _linear(f"{name}.q_down", a.q_rank, c.hidden, part, False)
    yield from _norm(c, f"{name}.q_down_norm", a.q_rank, part)
    yield from _linear(f"{name}.q_up", c.heads * q_head, a.q_rank, part, False)
    yield from _linear(f"{name}.kv_down", a.kv_rank + a.rope_head_dim, c.hidden, part, False)
    yield from _norm(c, f"{name}.kv_down_norm", a.kv_rank, part)
    yield from _linear(f"{name}.kv_up", c.heads * (a.nope_head_dim + a.v_head_dim), a.kv_rank, part, False)
    yield from _linear(f"{name}.out", c.hidden, c.heads * a.v_head_dim, part, False, out_std)
