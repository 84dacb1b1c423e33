"""Every operation of a decoder block, of the embedding and of the head, with its seconds forward and backward.

A `Tally` sums them by kind: `matmul`, `attention`, `memory` (element-wise and reducing kernels), and counts kernel
launches. Widths are one rank's share; sizes may be numbers or numpy arrays, which broadcast.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shardwise.model import ModelConfig
from shardwise.predict.time.kernels import WIDTH, Kernels
from shardwise.predict.time.profiles import Engine

Num = Any

METRIC_PASSES = 2
"""Passes of 16 bits over the logits that torch's cross-entropy without gradient makes: read, write the logarithms."""

KINDS = ("matmul", "attention", "memory")


@dataclass(frozen=True)
class Shape:
    """What one rank computes in one micro-batch.

    micro: sequences; seq: tokens of each on this rank; tp: ranks that share a block; stream: tokens of the residual
    stream on this rank (a tp-th under sequence parallelism); keys: tokens that are attended to; ep: expert ranks.
    dtype: of the matrix products, torch's name.
    """

    micro: Num
    seq: Num
    tp: Num
    stream: Num
    keys: Num
    ep: Num = 1
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> Num:
        return self.micro * self.seq

    @property
    def wide(self) -> str:
        """What is computed beside the products: in 16 bits under narrow types, else in the products' own."""
        return self.dtype if self.dtype == "float32" else "bfloat16"

    @property
    def width(self) -> float:
        """Bytes of an activation's element."""
        return WIDTH[self.wide]


@dataclass
class Tally:
    """Seconds by kind of one part's forward and backward, kernels launched, the seconds that selective recompute
    repeats, and of the backward ones those that gradients of weights take. dtype: of activations."""

    kernels: Kernels
    dtype: str = "bfloat16"
    forward: dict[str, Num] = field(default_factory=lambda: defaultdict(float))
    backward: dict[str, Num] = field(default_factory=lambda: defaultdict(float))
    selective: dict[str, Num] = field(default_factory=lambda: defaultdict(float))
    launches: dict[str, Num] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0, "selective": 0.0})
    weights: Num = 0.0

    def add(self, kind: str, forward: Num, backward: Num, launches: tuple[Num, Num] = (1, 1)) -> None:
        self.forward[kind] = self.forward[kind] + forward
        self.backward[kind] = self.backward[kind] + backward
        # Never in place: earlier readers share the arrays of launches.
        self.launches["forward"] = self.launches["forward"] + launches[0]
        self.launches["backward"] = self.launches["backward"] + launches[1]

    def memory(self, forward: Num, backward: Num, launches: tuple[Num, Num] = (1, 1), of: str = "") -> None:
        """Passes over memory: bytes forward and backward in so many kernels each. of: see `Kernels.pass_over`."""
        latency = self.kernels.pass_over(0.0)
        move = partial(self.kernels.pass_over, of=of, dtype=self.dtype)
        ahead = move(forward) + (launches[0] - 1) * latency
        back = move(backward) + (launches[1] - 1) * latency
        self.add("memory", ahead, back, launches)

    def linear(
        self, tokens: Num, wide: Num, deep: Num, shape: Shape, batch: Num = 1.0, accumulate: float = 0.0
    ) -> None:
        """A linear layer [tokens, deep] -> [tokens, wide], its input's gradient, its weight's gradient.

        accumulate: bytes moved for each weight to add its gradient to what was there.
        """
        mm, dtype = self.kernels.matmul, shape.dtype
        forward = mm(tokens, wide, deep, dtype, batch, "forward")
        weights = mm(wide, deep, tokens, dtype, batch, "weight")
        self.add("matmul", forward, mm(tokens, deep, wide, dtype, batch, "input") + weights, (1, 2))
        self.weights = self.weights + weights
        if dtype not in ("bfloat16", "float16", "float32"):
            # Quantised once for the forward and once, both ways, for the backward: 16 bits in, the narrow type out.
            self.memory(batch * tokens * deep * 3.0, batch * tokens * (deep + 2.0 * wide) * 2.0, (1, 2))
        if accumulate:
            self.memory(0.0, batch * wide * deep * accumulate * shape.width / 2, (0, 1))


def block(model: ModelConfig, shape: Shape, engine: Engine, kernels: Kernels, experts: bool = False) -> Tally:
    """One transformer block. experts: its feed-forward is the model's mixture of experts."""
    tally = Tally(kernels, shape.wide)
    stream = shape.stream * model.hidden * shape.width
    # Sequences are gathered twice and scattered twice; backward the same, and gathered twice more (Korthikanti 2022).
    _laid_out(tally, model, shape, engine, 4, 6)
    _norm(tally, model, stream, engine)
    _attention(tally, model, shape, engine)
    _residual(tally, stream, engine)
    if not model.parallel_residual:
        _norm(tally, model, stream, engine)
    if experts:
        _experts(tally, model, shape, engine)
    else:
        _feed_forward(tally, model, shape, engine, shape.tokens, model.ffn / shape.tp)
    _residual(tally, stream, engine)
    return tally


def _norm(tally: Tally, model: ModelConfig, stream: Num, engine: Engine) -> None:
    # The gradient that arrives over the residual is added to the norm's.
    ahead, back, launches = _norm_passes(tally, model, engine)
    tally.memory(ahead * stream, (back + 3) * stream, launches, "norm")


def _norm_passes(tally: Tally, model: ModelConfig, engine: Engine) -> tuple[float, float, tuple[int, int]]:
    """Passes of a norm over its input, in its own width, forward and backward, and its launches with the residual's."""
    if engine.fused_norm or model.norm != "rmsnorm":
        # Forward reads and writes; backward reads input and gradient, writes, and sums the weight's gradient apart.
        return 2.0, 3.0, (1, 3)
    if tally.dtype == "float32":
        return 5.0, 16.0, (4, 9)
    # Forward widens (3), takes the norm (2), scales (4), narrows (3), times the weight (2). Backward in fp32:
    # normalized input (3), gradient widened (3), their product (6), summed for the weight (2), scaled (4), summed (2),
    # scaled gradient (4), less its projection (6), times 1 / rms (4), narrowed (3).
    return 14.0, 37.0, (7, 11)


def _laid_out(tally: Tally, model: ModelConfig, shape: Shape, engine: Engine, forward: int, backward: int) -> None:
    """Copies of so many gathered or scattered tensors, whose shards of sequences lie end to end in memory only where
    there is one sequence."""
    if engine.sequence_copies:
        copied = 1.0 * ((np.asarray(shape.stream) < shape.tokens) & (np.asarray(shape.micro) > 1))
        moved = 2 * shape.tokens * model.hidden * shape.width * copied
        tally.memory(forward * moved, backward * moved, (forward * copied, backward * copied))


def _residual(tally: Tally, stream: Num, engine: Engine) -> None:
    """Bias, dropout with its mask of one byte, residual: one kernel where fused, else one each."""
    if engine.dropout:
        tally.memory(3.5 * stream, 2.5 * stream, (1, 1) if engine.fused_dropout_add else (3, 2))
    else:
        tally.memory(3 * stream, 0.0, (1, 0), "norm")


def _attention(tally: Tally, model: ModelConfig, shape: Shape, engine: Engine) -> None:
    tokens, accumulate, width = shape.tokens, engine.accumulate_bytes, shape.width
    q, kv = model.q_width / shape.tp, np.maximum(model.kv_width / shape.tp, model.head_dim)
    if model.latent_attention:
        _latent_projections(tally, model, shape, engine)
    else:
        tally.linear(tokens, q + 2 * kv, model.hidden, shape, accumulate=accumulate)
    if model.bias != "none":
        tally.memory(0.0, tokens * (q + 2 * kv) * width, (0, 1))
    if engine.qkv_copied:
        tally.memory(0.0, 2 * tokens * (q + 2 * kv) * width, (0, 1))
    if model.positions == "rope":
        passes = 1 if engine.fused_rope else 3
        moved = passes * 2 * tokens * (q + kv) * width
        tally.memory(moved, moved, (passes, passes), "rotation")
    if model.qk_norm:
        ahead, back, launches = _norm_passes(tally, model, engine)
        heads = tokens * (q + kv) * width
        tally.memory(ahead * heads, (back + 1) * heads, (2 * launches[0], 2 * launches[1] - 2), "norm")
    before = {kind: tally.forward[kind] for kind in KINDS}
    started = tally.launches["forward"]
    if engine.attention == "fused":
        _fused_core(tally, model, shape, engine)
    else:
        _score_core(tally, model, shape, engine)
    tally.selective.update({kind: tally.forward[kind] - before[kind] for kind in KINDS})
    tally.launches["selective"] = tally.launches["forward"] - started
    tally.linear(tokens, model.hidden, _value_width(model) / shape.tp, shape, accumulate=accumulate)


def _value_width(model: ModelConfig) -> int:
    latent = model.latent_attention
    return model.heads * latent.v_head_dim if latent else model.q_width


def _latent_projections(tally: Tally, model: ModelConfig, shape: Shape, engine: Engine) -> None:
    latent = model.latent_attention
    assert latent
    heads, tokens = model.heads / shape.tp, shape.tokens
    width = latent.nope_head_dim + latent.rope_head_dim
    tally.linear(tokens, latent.q_rank, model.hidden, shape)
    tally.linear(tokens, heads * width, latent.q_rank, shape)
    tally.linear(tokens, latent.kv_rank + latent.rope_head_dim, model.hidden, shape)
    tally.linear(tokens, heads * (latent.nope_head_dim + latent.v_head_dim), latent.kv_rank, shape)
    # Norms of both low ranks, and laying out heads whose rotated part is shared.
    moved = tokens * (latent.q_rank + latent.kv_rank + 2 * heads * width) * shape.width
    tally.memory(2 * moved, 3 * moved, (4, 6))


def _fused_core(tally: Tally, model: ModelConfig, shape: Shape, engine: Engine) -> None:
    heads, kv, width = model.heads / shape.tp, np.maximum(model.kv_heads / shape.tp, 1), core_width(model)
    kernels = tally.kernels
    slower = kernels.constants.value("triton_attention") if engine.attention_kernel == "triton" else 1.0
    # Context parallelism balances the causal mask over the ranks (zigzag): each has half of its rectangle.
    forward = slower * kernels.attention(
        shape.micro, shape.seq, shape.keys, heads, kv, width, dtype=shape.wide, attended=0.5
    )
    tally.add("attention", forward, kernels.attention_ratio(width, shape.keys, shape.wide) * forward, (1, 3))


def core_width(model: ModelConfig) -> float:
    """Width of a head in the attention's core: of latent attention, the mean of its two products'."""
    latent = model.latent_attention
    return (latent.nope_head_dim + latent.rope_head_dim + latent.v_head_dim) / 2 if latent else model.head_dim


def _score_core(tally: Tally, model: ModelConfig, shape: Shape, engine: Engine) -> None:
    """Q Kᵀ, scale and mask and softmax, dropout, P V: what Megatron-LM did before fused attention."""
    heads, d, mm = model.heads / shape.tp, core_width(model), tally.kernels.matmul
    batch, seq, keys, wide = shape.micro * heads, shape.seq, shape.keys, shape.wide
    scores, context = mm(seq, keys, d, wide, batch), mm(seq, d, keys, wide, batch)
    # A head width that is no multiple of eight elements leaves 16-byte loads unused (NVIDIA, Matrix Multiplication
    # Background User's Guide, section 2.2).
    odd = np.where(np.asarray(d) % 8 == 0, 1.0, tally.kernels.constants.value("misaligned"))
    forward = (scores + context) * odd
    tally.add("matmul", forward, forward + (scores + mm(keys, d, seq, wide, batch)) * odd, (2, 4))
    square = batch * seq * keys * shape.width
    fits = np.asarray(batch) % engine.softmax_multiple == 0
    # Where the fused kernel does not fit: an fp32 copy, scale, mask, softmax, and back, each a kernel.
    ahead, back, kernels = (
        np.where(fits & engine.fused_softmax, few, many) for few, many in ((2, 18), (3, 14), (1, 6))
    )
    tally.memory(ahead * square, back * square, (kernels, kernels), "softmax")
    if engine.dropout:
        tally.memory(2.5 * square, 2.5 * square)
    tally.memory(2 * shape.tokens * heads * d * shape.width, 2 * shape.tokens * heads * d * shape.width)


def _feed_forward(tally: Tally, model: ModelConfig, shape: Shape, engine: Engine, tokens: Num, width: Num,
                  batch: Num = 1.0) -> None:  # fmt: skip
    branches = 2 if model.gated else 1
    tally.linear(tokens, branches * width, model.hidden, shape, batch, engine.accumulate_bytes)
    inner = batch * tokens * width * shape.width
    passes = 1 if engine.fused_activation else branches
    ahead, back = (3.0, 5.0) if model.gated else (2.0, 3.0)
    tally.memory((ahead + 2 * (passes - 1)) * inner, (back + 3 * (passes - 1)) * inner, (passes, passes), "activation")
    if model.bias == "all":
        tally.memory(0.0, inner + batch * tokens * model.hidden * shape.width, (0, 2))
    tally.linear(tokens, model.hidden, width, shape, batch, engine.accumulate_bytes)


def _experts(tally: Tally, model: ModelConfig, shape: Shape, engine: Engine) -> None:
    """Router, permutation, the experts of this rank as one grouped product, and back; shared experts beside."""
    experts = model.experts
    assert experts
    tokens, routed = shape.stream, shape.stream * experts.active
    router = tally.kernels.matmul(tokens, experts.count, model.hidden, shape.wide)
    tally.add("matmul", router, 2 * router, (1, 2))
    tally.memory(tokens * experts.count * 4.0 * 6, tokens * experts.count * 4.0 * 6, (8, 8))
    rows = routed * model.hidden * shape.width
    tally.memory(2 * 2 * rows, 2 * 3 * rows, (4, 4))
    local = np.maximum(experts.count / shape.ep, 1)
    _feed_forward(tally, model, shape, engine, routed / local, experts.ffn, local)
    if experts.shared:
        _feed_forward(tally, model, shape, engine, tokens, experts.ffn * experts.shared)


def embedding(model: ModelConfig, shape: Shape, engine: Engine, kernels: Kernels) -> Tally:
    """The lookup of rows, their scattered addition backward, dropout."""
    tally = Tally(kernels, shape.wide)
    rows = shape.tokens * model.hidden * shape.width
    tally.memory(2 * rows, 3 * rows, (2, 3))
    _laid_out(tally, model, shape, engine, 1, 1)
    if model.embedding_norm:
        _norm(tally, model, shape.stream * model.hidden * shape.width, engine)
    if engine.dropout:
        tally.memory(2.5 * rows, 2.5 * rows)
    return tally


def head(model: ModelConfig, shape: Shape, engine: Engine, kernels: Kernels) -> Tally:
    """The final norm, the product with the vocabulary, the loss over it."""
    tally = Tally(kernels, shape.wide)
    vocab = padded_vocab(model, engine, shape.tp) / shape.tp
    _laid_out(tally, model, shape, engine, 1, 2)
    _norm(tally, model, shape.stream * model.hidden * shape.width, engine)
    wide = Shape(shape.micro, shape.seq, shape.tp, shape.stream, shape.keys, dtype=shape.wide)
    tally.linear(shape.tokens, vocab, model.hidden, wide, accumulate=engine.accumulate_bytes)
    logits = shape.tokens * vocab * shape.width
    if engine.metric_losses:
        tally.memory(engine.metric_losses * METRIC_PASSES * logits, 0.0, (3 * engine.metric_losses, 0))
    if engine.fused_loss:
        ahead, back = engine.loss_passes
        tally.memory(ahead * logits, back * logits, (3, 2), "loss")
    else:
        # fp32 copy (3), maximum (2), difference (4), exponential (4), sum (2), quotient (4); then product and cast.
        tally.memory(19 * logits, 7 * logits, (12, 4), "loss")
    return tally


def padded_vocab(model: ModelConfig, engine: Engine, tp: Num) -> Num:
    """Rows of the embedding as the engine pads them."""
    multiple = engine.vocab_multiple * tp if engine.vocab_multiple > 1 else tp
    return np.ceil(model.vocab / multiple) * multiple
