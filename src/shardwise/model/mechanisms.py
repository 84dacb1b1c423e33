"""Mechanisms of decoders: for each its parameters and operations, as a model's numbers say."""

import math
from collections.abc import Iterator
from typing import Any, Literal

from shardwise.model.blueprint import Cut, Parameter
from shardwise.model.config import LatentAttention, ModelConfig
from shardwise.model.operations import AttentionCore, Elementwise, LinearOp, Operation, Rows, Width

STD = 0.02

Pieces = Iterator[Parameter | Operation]


def residual_std(c: ModelConfig) -> float:
    """Projections that write into the residual stream start smaller: its variance must not grow with depth (GPT-2)."""
    return STD / math.sqrt(2 * c.layers)


def norm(c: ModelConfig, name: str, width: int, partial: bool = False) -> Iterator[Parameter]:
    """A norm over `width` elements. partial: each tensor-parallel rank applies it to its own heads only."""
    yield _norm_weight(c, name, width, partial=partial)
    if c.norm == "layernorm":
        yield Parameter(f"{name}.bias", (width,), init="zeros", decay=False, partial=partial)


def _norm_weight(c: ModelConfig, name: str, width: int, **placement: Any) -> Parameter:
    init: Literal["zeros", "ones"] = "zeros" if c.norm_zero_centered else "ones"
    return Parameter(f"{name}.weight", (width,), init=init, decay=False, **placement)


def linear(
    name: str, out: int, inp: int, cut: Cut = "replicated", bias: bool = False, std: float = STD, heads: int = 0
) -> Iterator[Parameter]:
    """A linear map; its bias is cut as its outputs are."""
    yield Parameter(f"{name}.weight", (out, inp), std=std, cut=cut, heads=heads)
    if bias:
        outputs = "replicated" if cut == "row" else cut
        yield Parameter(f"{name}.bias", (out,), init="zeros", decay=False, cut=outputs, heads=heads)


def embedding(c: ModelConfig) -> Pieces:
    """The table of tokens, learned positions, a norm."""
    yield Elementwise("lookup", (Width(c.hidden),))
    if c.scaled_embedding:
        yield Elementwise("scale", (Width(c.hidden),))
    yield Parameter("tokens.weight", (c.vocab, c.hidden), cut="vocab")
    if c.positions == "learned":
        yield Parameter("positions", (c.max_positions, c.hidden))
    if c.embedding_norm:
        yield from norm(c, "norm", c.hidden)
        yield Elementwise(c.norm, (Width(c.hidden),))
    yield Elementwise("dropout", (Width(c.hidden),))


def head(c: ModelConfig) -> Pieces:
    """The final norm, and the projection to logits where it is not the embedding's table."""
    yield from norm(c, "norm", c.hidden)
    yield Elementwise(c.norm, (Width(c.hidden),))
    yield LinearOp("logits", Width(c.hidden), (Width(c.vocab, cut=True),))
    if c.logit_softcap:
        yield Elementwise("soft cap", (Width(c.vocab, cut=True),))
    if not c.tied:
        yield Parameter("out.weight", (c.vocab, c.hidden), cut="vocab")


def block(c: ModelConfig, experts: bool, window: int = 0) -> Pieces:
    """One block. experts: its feed-forward is the model's mixture of experts. window: of its attention."""
    latent = c.latent_attention
    yield from _branch(c, "attention", latent_attention(c, latent) if latent else attention(c, window))
    yield from _branch(c, "mlp", mixture(c) if experts else feed_forward(c, "mlp", c.ffn))


def _branch(c: ModelConfig, name: str, pieces: Pieces) -> Pieces:
    """Branches of the residual stream, with their norms. Those of a parallel residual read the same input, which is
    one operation."""
    stream = (Width(c.hidden),)
    if c.norm_placement != "post":
        yield from norm(c, f"{name}_norm", c.hidden)
        if not (c.parallel_residual and name == "mlp"):
            yield Elementwise(c.norm, stream)
    yield from pieces
    if c.norm_placement != "pre":
        yield from norm(c, f"{name}_post_norm", c.hidden)
        yield Elementwise("branch norm", stream)
    yield Elementwise("residual", stream)


def attention(c: ModelConfig, window: int) -> Pieces:
    """Multi-head attention with grouped key/value heads."""
    bias = c.bias != "none"
    yield from linear("attention.qkv.q", c.q_width, c.hidden, "column", bias, heads=c.heads)
    for name in ("k", "v"):
        yield from linear(f"attention.qkv.{name}", c.kv_width, c.hidden, "kv heads", bias, heads=c.kv_heads)
    yield LinearOp("linear", Width(c.hidden), _heads(c))
    if bias:
        yield Elementwise("bias gradients", _heads(c))
    if c.qk_norm and c.qk_norm_scope == "head":
        for name in ("q_norm", "k_norm"):
            yield _norm_weight(c, f"attention.{name}", c.head_dim, partial=True)
    elif c.qk_norm:
        yield _norm_weight(c, "attention.qk_norm.q", c.q_width, cut="column", heads=c.heads)
        yield _norm_weight(c, "attention.qk_norm.k", c.kv_width, cut="kv heads", heads=c.kv_heads)
    yield from _core(c, c.head_dim, c.head_dim, window)
    yield from linear("attention.out", c.hidden, c.q_width, "row", c.bias == "all", residual_std(c), c.heads)


def _heads(c: ModelConfig) -> tuple[Width, ...]:
    kv = Width(c.kv_width, cut=True, least=c.head_dim)
    return Width(c.q_width, cut=True), kv, kv


def _core(c: ModelConfig, key_width: int, value_width: int, window: int = 0) -> Iterator[Operation]:
    """From the projections to what attention adds to the residual stream."""
    q, k, v = _heads(c)
    yield Elementwise("split heads", (q, k, v))
    if c.positions == "rope":
        yield Elementwise("rotation", (q, k))
    if c.qk_norm:
        yield Elementwise("head norms" if c.qk_norm_scope == "head" else "joint norms", (q, k))
    yield AttentionCore(c.heads, c.kv_heads, key_width, value_width, window, c.score_softcap or 0.0)
    yield LinearOp("linear", Width(c.heads * value_width, cut=True), (Width(c.hidden),))


def latent_attention(c: ModelConfig, a: LatentAttention) -> Pieces:
    """DeepSeek's attention; the projections to low ranks are on every tensor-parallel rank, as in Megatron-Core."""
    keys, heads, hidden = a.head_dim, c.heads, Width(c.hidden)
    up = heads * keys, heads * (a.nope_head_dim + a.v_head_dim)
    if a.q_rank:
        yield from linear("attention.q_down", a.q_rank, c.hidden)
        yield LinearOp("linear", hidden, (Width(a.q_rank),))
        yield from norm(c, "attention.q_down_norm", a.q_rank)
        yield from linear("attention.q_up", up[0], a.q_rank, "column", heads=heads)
        yield LinearOp("linear", Width(a.q_rank), (Width(up[0], cut=True),))
    else:
        yield from linear("attention.q", up[0], c.hidden, "column", heads=heads)
        yield LinearOp("linear", hidden, (Width(up[0], cut=True),))
    yield from linear("attention.kv_down", a.kv_rank + a.rope_head_dim, c.hidden)
    yield LinearOp("linear", hidden, (Width(a.kv_rank + a.rope_head_dim),))
    yield from norm(c, "attention.kv_down_norm", a.kv_rank)
    yield Parameter("attention.kv_up.weight", (up[1], a.kv_rank), cut="column", heads=heads, absorbed=True)
    yield LinearOp("linear", Width(a.kv_rank), (Width(up[1], cut=True),))
    yield Elementwise("low ranks", (Width(a.q_rank), Width(a.kv_rank)))
    yield Elementwise("shared key", (Width(a.rope_head_dim), Width(2 * heads * keys, cut=True)))
    yield from _core(c, keys, a.v_head_dim)
    yield from linear("attention.out", c.hidden, heads * a.v_head_dim, "row", std=residual_std(c), heads=heads)


def feed_forward(c: ModelConfig, name: str, width: int) -> Pieces:
    """A feed-forward part, gated or not."""
    for branch in ("gate_up.gate", "gate_up.up") if c.gated else ("up.up",):
        yield from linear(f"{name}.{branch}", width, c.hidden, "column", c.bias == "all")
    yield from linear(f"{name}.down", c.hidden, width, "row", c.bias == "all", residual_std(c))
    yield from products(c, width)


def products(c: ModelConfig, width: int, rows: Rows = "tokens", count: int = 1, active: int = 1) -> Iterator[Operation]:
    """Operations of a feed-forward part, or of `count` of them at once."""
    inner, hidden = Width(width, cut=True), Width(c.hidden)
    outputs = (inner,) * (2 if c.gated else 1)
    yield LinearOp("linear", hidden, outputs, rows, count, active)
    yield Elementwise("gated activation" if c.gated else "activation", (inner,), rows, count, active)
    if c.bias == "all":
        yield Elementwise("bias gradients", outputs, rows, count, active)
        yield Elementwise("bias gradients", (hidden,), rows, count, active)
    yield LinearOp("linear", inner, (hidden,), rows, count, active)


def mixture(c: ModelConfig) -> Pieces:
    """Router, routed experts, and shared experts, which see every token.

    Weights of the routed experts are stacked, one [hidden, ffn] matrix for each: gate and up as they multiply a row
    from the right, down transposed. So an expert is rows of them, and a part of every expert's width is columns.
    """
    assert c.experts
    e = c.experts
    yield Parameter("mlp.router.weight", (e.count, c.hidden), partial=True)
    if e.router_bias:
        yield Parameter("mlp.router.bias", (e.count,), init="zeros", decay=False)
    yield LinearOp("router", Width(c.hidden), (Width(e.count),), "stream")
    yield Elementwise("dispatch", (Width(c.hidden),), "routed", e.count, e.active)
    for name in ("gate", "up", "down") if c.gated else ("up", "down"):
        std = residual_std(c) if name == "down" else STD
        yield Parameter(f"mlp.experts.{name}", (e.count * c.hidden, e.ffn), std=std, cut="expert", heads=e.count)
    yield from products(c, e.ffn, "routed", e.count, e.active)
    if e.shared:
        yield from feed_forward(c, "mlp.shared", e.shared * e.ffn)
