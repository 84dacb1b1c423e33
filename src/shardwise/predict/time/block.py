"""The operations of a part of a model, each with its seconds forward and backward.

A `PartSeconds` sums them by kind: `matmul`, `attention`, `memory` (element-wise and reducing kernels), and counts
kernel launches. Widths are one rank's share; sizes may be numbers or numpy arrays, which broadcast.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from functools import partial

import numpy as np

from shardwise.arrays import Num
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Part
from shardwise.model.lora import BASES, INT8, NF4
from shardwise.model.operations import AttentionCore, Elementwise, LinearOp, Operation, Width
from shardwise.model.parameters import blueprint
from shardwise.predict.time.kernels import WIDTH, Kernels
from shardwise.predict.time.profiles import EngineProfile
from shardwise.records import dataclass

METRIC_PASSES = 2
"""Passes of 16 bits over the logits that torch's cross-entropy without gradient makes: read, write the logarithms."""

KINDS = ("matmul", "attention", "memory")


@dataclass(frozen=True)
class Shape:
    """Work of one rank in one micro-batch.

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
    pieces: Num = 1
    """Ranks that split each map, beside `tp`: its outputs are gathered."""
    expert_tp: Num = 1
    """Ranks that share the width of one expert."""
    routes: Num | None = None
    """Tokens that this rank routes to experts; None where those are its tokens of the residual stream."""
    ring: Num = 1
    """Pieces in which a ring brings the keys: each is a kernel of its own."""
    weight_bytes: Num = 2.0
    """Bytes moved per weight by the product that makes its gradient (`gradients.product_bytes`)."""

    @property
    def tokens(self) -> Num:
        return self.micro * self.seq

    @property
    def routed(self) -> Num:
        """Tokens that this rank routes to experts."""
        return self.stream if self.routes is None else self.routes

    @property
    def wide(self) -> str:
        """Type of what is computed beside the products: in 16 bits under narrow types, else in the products' own."""
        return self.dtype if self.dtype == "float32" else "bfloat16"

    @property
    def narrow(self) -> bool:
        """Whether products take less than 16 bits, to which their inputs are quantised."""
        return self.dtype not in ("bfloat16", "float16", "float32")

    @property
    def width(self) -> float:
        """Bytes of an activation's element."""
        return WIDTH[self.wide]


@dataclass
class PartSeconds:
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
        self, tokens: Num, wide: Num, deep: Num, shape: Shape, batch: Num = 1.0, added: bool = False,
        quantised: tuple[Num, bool] = (True, True), trains: bool = True,
    ) -> None:  # fmt: skip
        """A linear layer [tokens, deep] -> [tokens, wide], its input's gradient, its weight's gradient.

        added: whether a kernel of its own adds the weight's gradient to the earlier ones (`gradients.added_seconds`).
        quantised: whether its input, and the gradient of its output, are quantised by kernels of their own where the
        type is narrow. trains: whether its weight's gradient is computed.
        """
        mm, dtype = self.kernels.matmul, shape.dtype
        forward = mm(tokens, wide, deep, dtype, batch, "forward")
        weights = mm(wide, deep, tokens, dtype, batch, "weight", shape.weight_bytes) if trains else 0.0
        self.add("matmul", forward, mm(tokens, deep, wide, dtype, batch, "input") + weights, (1, 1 + trains))
        self.weights = self.weights + weights
        if shape.narrow:
            # Quantised once for the forward and once, both ways, for the backward: 16 bits in, the narrow type out.
            inputs, gradients = deep * quantised[0], 2.0 * wide * quantised[1]
            self.memory(batch * tokens * inputs * 3.0, batch * tokens * (inputs + gradients) * 2.0, (1, 2))
        if added and trains:
            self.launches["backward"] = self.launches["backward"] + 1

    def dense(self, wide: Num, deep: Num, operation: LinearOp, shape: Shape) -> None:
        """Frozen matrices in fewer bits, which a pass converts and then scales in place; all but int8 in fp32, and
        NF4 from numbers of 4 bytes for two elements (`decoder/bases.py`)."""
        last = 0.0 if shape.width == 4 else 4.0 + shape.width  # from fp32 to the layout's precision
        passes = {INT8: 3.0 * shape.width, NF4: 16 + last}.get(operation.base, 12 + last)
        kernels = {INT8: 2, NF4: 8}.get(operation.base, 5) * len(operation.outputs)
        moved = wide * deep * (BASES[operation.base].width + passes)
        self.memory(moved, moved, (kernels, kernels))

    def adapter(self, tokens: Num, wide: Num, deep: Num, rank: int, shape: Shape) -> None:
        """A low-rank adapter of a linear layer, whose inner product is computed again in backward."""
        self.linear(tokens, rank, deep, shape)
        self.linear(tokens, wide, rank, shape)
        self.add("matmul", 0.0, self.kernels.matmul(tokens, rank, deep, shape.dtype, 1.0, "forward"), (0, 1))


def tally_part(part: Part, model: ModelConfig, shape: Shape, engine: EngineProfile, kernels: Kernels) -> PartSeconds:
    """All operations of a part of a model."""
    tally = PartSeconds(kernels, shape.wide)
    # Under sequence parallelism inputs are gathered and outputs scattered; backward the same, and inputs gathered once
    # more for the gradients of weights (Korthikanti et al. 2022).
    ahead, back = part.gathered + part.summed, 2 * part.gathered + part.summed
    _laid_out(tally, model.hidden, shape, engine, ahead, back)
    for scope, operation in _scopes(part):
        called = dict(tally.launches)
        if operation.kind == "attention":
            before = {kind: tally.forward[kind] for kind in KINDS}
            started = tally.launches["forward"]
            # A soft cap is inside the product only in an engine's own kernels.
            fused = engine.attention == "fused" and (engine.fused_softmax or not operation.softcap)
            (_fused_core if fused else _score_core)(tally, operation, shape, engine)
            tally.selective.update({kind: tally.forward[kind] - before[kind] for kind in KINDS})
            tally.launches["selective"] = tally.launches["forward"] - started
        elif operation.kind == "logits":
            ranks = shape.tp * shape.pieces
            _logits(tally, operation, padded_vocab(model, engine, ranks) / ranks, shape, engine)
        elif operation.kind == "linear":
            _linear(tally, operation, shape, engine)
        elif operation.kind == "router":
            tokens, (experts,) = shape.routed, operation.outputs
            router = tally.kernels.matmul(tokens, experts.size, operation.inputs.size, shape.wide)
            tally.add("matmul", router, 2 * router, (1, 2))
            tally.memory(tokens * experts.size * 4.0 * 6, tokens * experts.size * 4.0 * 6, (8, 8))
        else:
            _ELEMENTWISE[operation.kind](tally, operation, shape, engine)
        if model.experts and scope in engine.captured:
            tally.launches.update(called)
    if engine.selective == "operations":
        shares = {"matmul": 0.5, "attention": 0.0, "memory": 1.0}
        tally.selective.update({kind: share * tally.forward[kind] for kind, share in shares.items()})
        tally.launches["selective"] = tally.launches["forward"]
    return tally


def _scopes(part: Part) -> Iterator[tuple[str, Operation]]:
    """The operations of a part, each with the name of what an engine may capture it with (`EngineProfile.captured`)."""
    scope = "attention"
    for operation in part.operations:
        if operation.kind == "router":
            yield "router", operation
            scope = "experts"
        else:
            yield scope, operation


def routed(part: Part) -> LinearOp | None:
    """The first product of a part's routed experts, None where it has none."""
    products = (operation for operation in part.operations if isinstance(operation, LinearOp))
    return next((product for product in products if product.rows == "routed"), None)


def on_rank(width: Width, tp: Num) -> Num:
    """A rank's elements of a width."""
    return np.maximum(width.size / tp, width.least) if width.cut else width.size


def _rows(operation: LinearOp | Elementwise, shape: Shape) -> tuple[Num, Num, Num]:
    """Rows that each of the rank's products takes, how many of these there are, and the ranks that cut each one."""
    if operation.rows == "routed":
        local = np.maximum(operation.count / shape.ep, 1)
        return shape.routed * operation.active / local, local, shape.expert_tp
    return (shape.routed, 1.0, 1) if operation.rows == "stream" else (shape.tokens, 1.0, shape.tp)


def _moved(operation: Elementwise, shape: Shape) -> Num:
    """Bytes of its tensors on a rank."""
    rows, times, tp = _rows(operation, shape)
    return times * rows * sum(on_rank(width, tp) for width in operation.widths) * shape.width


def _stream(operation: Elementwise, shape: Shape) -> Num:
    """Bytes of its tensors in a rank's shard of the residual stream."""
    return shape.stream * sum(width.size for width in operation.widths) * shape.width


def _linear(tally: PartSeconds, operation: LinearOp, shape: Shape, engine: EngineProfile) -> None:
    rows, times, tp = _rows(operation, shape)
    wide = sum(on_rank(width, tp) for width in operation.outputs)
    cut = operation.rows == "tokens" and any(width.cut for width in (operation.inputs, *operation.outputs))
    pieces = shape.pieces if cut else 1
    fused, first = engine.fused_experts and operation.rows == "routed", not operation.inputs.cut
    quantised: tuple[Num, bool] = (first, not first) if fused else (True, True)
    if engine.gathers_narrow and first and not fused:
        # Its input is quantised before it is gathered; backward takes it gathered.
        quantised = (0.4 + 0.6 / np.asarray(tp), True)
    deep, trains, added = on_rank(operation.inputs, tp), not operation.frozen, adds_apart(engine)
    if engine.products_apart and len(operation.outputs) > 1:
        for width in operation.outputs:
            each = on_rank(width, tp) / pieces
            tally.linear(rows, each, deep, shape, times, added, quantised, trains)
        more = len(operation.outputs) - 1
        tally.memory(0.0, 3.0 * more * times * rows * deep * shape.width, (0, more))
    else:
        tally.linear(rows, wide / pieces, deep, shape, times, added, quantised, trains)
    if operation.base:
        tally.dense(wide, deep, operation, shape)
    for rank, width in zip(operation.adapters, operation.outputs, strict=False):
        if rank:
            tally.adapter(rows, on_rank(width, tp), deep, rank, shape)
    gathered = 2 * shape.tokens * wide * shape.width * (np.asarray(pieces) > 1)
    if np.any(gathered):  # ranks' pieces, laid side by side
        tally.memory(gathered, 0.0, (len(operation.outputs), 0))


def adds_apart(engine: EngineProfile) -> bool:
    """Whether autograd adds each weight's gradient to the earlier ones in a kernel of its own."""
    return engine.accumulate_bytes != "plan" and any(engine.accumulate_bytes)


def _norm(tally: PartSeconds, operation: Elementwise, shape: Shape, engine: EngineProfile) -> None:
    # The gradient that arrives over the residual is added to the norm's.
    ahead, back, launches = _norm_passes(tally, operation.kind == "rmsnorm", engine)
    stream = _stream(operation, shape)
    tally.memory(ahead * stream, (back + 3) * stream, launches, "norm")


def _branch_norm(tally: PartSeconds, operation: Elementwise, shape: Shape, engine: EngineProfile) -> None:
    """The norm of a branch's output, beside whose gradient no other arrives."""
    ahead, back, launches = _norm_passes(tally, True, engine)
    stream = _stream(operation, shape)
    tally.memory(ahead * stream, back * stream, (launches[0], launches[1] - 1), "norm")


def _passes(tally: PartSeconds, operation: Elementwise, shape: Shape, engine: EngineProfile) -> None:
    ahead, back, launches, needs = _PASSES[operation.kind]
    if not needs or getattr(engine, needs):
        moved = _moved(operation, shape)
        tally.memory(ahead * moved, back * moved, launches)


def _head_norms(tally: PartSeconds, operation: Elementwise, shape: Shape, engine: EngineProfile) -> None:
    ahead, back, launches = _norm_passes(tally, True, engine)
    heads = _moved(operation, shape)
    tally.memory(ahead * heads, (back + 1) * heads, (2 * launches[0], 2 * launches[1] - 2), "norm")


def _norm_passes(tally: PartSeconds, rms: bool, engine: EngineProfile) -> tuple[float, float, tuple[int, int]]:
    """Passes of a norm over its input, in its own width, forward and backward, and its launches with the residual's."""
    if engine.torch_norm and rms:
        # [8192, 8192] in 164 µs on an H100 (2026-11-23), where a copy of as many bytes takes 93; backward with the sums
        # for the weight's gradient as many passes more as without them.
        return 3.5, 5.3, (1, 3)
    if engine.fused_norm or not rms:
        # Forward reads and writes; backward reads input and gradient, writes, and sums the weight's gradient apart.
        return 2.0, 3.0, (1, 3)
    if tally.dtype == "float32":
        return 5.0, 16.0, (4, 9)
    # Forward widens (3), takes the norm (2), scales (4), narrows (3), times the weight (2). Backward in fp32:
    # normalized input (3), gradient widened (3), their product (6), summed for the weight (2), scaled (4), summed (2),
    # scaled gradient (4), less its projection (6), times 1 / rms (4), narrowed (3).
    return 14.0, 37.0, (7, 11)


def _laid_out(
    tally: PartSeconds, hidden: int, shape: Shape, engine: EngineProfile, forward: int, backward: int
) -> None:
    """Copies of so many gathered or scattered tensors, whose shards of sequences lie end to end in memory only where
    there is one sequence."""
    if engine.sequence_copies:
        copied = 1.0 * ((np.asarray(shape.stream) < shape.tokens) & (np.asarray(shape.micro) > 1))
        moved = 2 * shape.tokens * hidden * shape.width * copied
        tally.memory(forward * moved, backward * moved, (forward * copied, backward * copied))


def _residual(tally: PartSeconds, operation: Elementwise, shape: Shape, engine: EngineProfile) -> None:
    """Bias, dropout with its mask of one byte, residual: one kernel where fused, else one each."""
    stream = _stream(operation, shape)
    if engine.dropout:
        tally.memory(3.5 * stream, 2.5 * stream, (1, 1) if engine.fused_dropout_add else (3, 2))
    else:
        tally.memory(3 * stream, 0.0, (1, 0), "norm")


def _bias_gradients(tally: PartSeconds, operation: Elementwise, shape: Shape, engine: EngineProfile) -> None:
    """Gradients of biases, and routed experts' biases. Where an engine adds those of the last product expert by expert,
    each times its token's weight in fp32, passes of 16 bits: the product written (2), read, added and written (5), all
    experts' joined (4), narrowed (3); backward widened (3), narrowed (3), the gradients of weight and bias, each with a
    product written and summed (12), joined (2)."""
    routed = operation.rows == "routed"
    if routed and engine.fused_experts and shape.narrow:
        return
    moved, times = _moved(operation, shape), _rows(operation, shape)[1]
    if not (routed and engine.biases_by_expert) or operation.widths[0].cut:
        tally.memory(0.0, moved, (0, 1))
    else:
        tally.memory(14 * moved, 20 * moved, (3 * times, 6 * times))


def _rotation(tally: PartSeconds, operation: Elementwise, shape: Shape, engine: EngineProfile) -> None:
    (ahead, back), launches = ((2.0, 2.0), 1) if engine.fused_rope else (engine.rope_passes, 3)
    moved = _moved(operation, shape)
    tally.memory(ahead * moved, back * moved, (launches, launches), "rotation")


def _fused_core(tally: PartSeconds, core: AttentionCore, shape: Shape, engine: EngineProfile) -> None:
    heads, kv, width = core.heads / shape.tp, np.maximum(core.kv_heads / shape.tp, 1), core_width(core)
    kernels = tally.kernels
    which = engine.attention_kernel
    slower = 1.0 if which == "measured" else kernels.constants.value(f"{which}_attention")
    # Context parallelism balances the causal mask over the ranks (zigzag): each has half of its rectangle.
    window = core.window * (core.window < np.asarray(shape.keys))
    of_heads = (heads, kv, width)
    whole = kernels.attention(
        shape.micro, shape.seq, shape.keys, *of_heads, dtype=shape.wide,
        attended=np.where(window > 0, _attended(core, shape), 0.5), window=window,
    )  # fmt: skip
    pieces = np.where(window > 0, 1, np.asarray(shape.ring))
    if np.any(pieces > 1):
        # Of its own keys a rank attends to the triangle, of each other rank's to half, in zigzag order.
        own = kernels.attention(shape.micro, shape.seq, shape.seq, *of_heads, dtype=shape.wide)
        half = kernels.attention(shape.micro, shape.seq, shape.seq / 2, *of_heads, causal=False, dtype=shape.wide)
        whole = np.where(pieces > 1, own + (pieces - 1) * half, whole)
    forward, keys = slower * whole, np.where(pieces > 1, shape.seq, shape.keys)
    backward = kernels.attention_ratio(width, keys, shape.wide) * forward
    tally.add("attention", forward, backward, (1 * pieces, 3 * pieces))


def _attended(core: AttentionCore, shape: Shape) -> Num:
    """Share of the pairs of a token and a key in its window that a causal mask leaves."""
    keys = np.asarray(shape.keys)
    window = np.minimum(core.window or keys, keys)
    return 1 - window / (2 * keys)


def core_width(core: AttentionCore) -> float:
    """Width of a head in the attention's core: the mean of its two products'."""
    return (core.key_width + core.value_width) / 2


def core_of(model: ModelConfig) -> AttentionCore:
    """The attention of a model's blocks."""
    return attention_of(blueprint(model).of_kind("block")[0])


def attention_of(block: Part) -> AttentionCore:
    """The attention of a block."""
    return next(operation for operation in block.operations if operation.kind == "attention")


def _score_core(tally: PartSeconds, core: AttentionCore, shape: Shape, engine: EngineProfile) -> None:
    """Q Kᵀ, scale and mask and softmax, dropout, P V: what Megatron-LM did before fused attention."""
    heads, d, mm = core.heads / shape.tp, core_width(core), tally.kernels.matmul
    batch, seq, keys, wide = shape.micro * heads, shape.seq, shape.keys, shape.wide
    attended: Num = 1.0
    if core.softcap:
        # By blocks of queries, which leave out the keys that none of them sees.
        attended, keys = _attended(core, shape), np.minimum(core.window or keys, keys)
    scores, context = mm(seq, keys, d, wide, batch), mm(seq, d, keys, wide, batch)
    # A head width that is no multiple of eight elements leaves 16-byte loads unused (NVIDIA, Matrix Multiplication
    # Background User's Guide, section 2.2).
    odd = np.where(np.asarray(d) % 8 == 0, 1.0, tally.kernels.constants.value("misaligned"))
    odd = odd * attended
    forward = (scores + context) * odd
    tally.add("matmul", forward, forward + (scores + mm(keys, d, seq, wide, batch)) * odd, (2, 4))
    square = batch * seq * keys * shape.width * attended
    if core.softcap:
        tally.memory(6 * square, 7 * square, (3, 3), "softmax")
    fits = np.asarray(batch) % engine.softmax_multiple == 0
    # Where the fused kernel does not fit: an fp32 copy, scale, mask, softmax, and back, each a kernel.
    ahead, back, kernels = (
        np.where(fits & engine.fused_softmax, few, many) for few, many in ((2, 18), (3, 14), (1, 6))
    )
    tally.memory(ahead * square, back * square, (kernels, kernels), "softmax")
    if engine.dropout:
        tally.memory(2.5 * square, 2.5 * square)
    tally.memory(2 * shape.tokens * heads * d * shape.width, 2 * shape.tokens * heads * d * shape.width)


def _activation(tally: PartSeconds, operation: Elementwise, shape: Shape, engine: EngineProfile) -> None:
    if engine.fused_experts and operation.rows == "routed" and shape.narrow:
        return
    inner, gated = _moved(operation, shape), operation.kind == "gated activation"
    passes = 1 if engine.fused_activation else 1 + gated
    ahead, back = (3.0, 5.0) if gated else (2.0, 3.0)
    tally.memory((ahead + 2 * (passes - 1)) * inner, (back + 3 * (passes - 1)) * inner, (passes, passes), "activation")


def _dispatch(tally: PartSeconds, operation: Elementwise, shape: Shape, engine: EngineProfile) -> None:
    """Permutation of routed tokens on their way to the experts and back. Rows that come each by itself come rank by
    rank, and are laid out expert by expert, and the other way round on the way back."""
    rows = operation.active * shape.routed * sum(width.size for width in operation.widths) * shape.width
    sorts = 1.0 * ((np.asarray(shape.ep) > 1) & (engine.exchange == "rows"))
    tally.memory((4 + 4 * sorts) * rows, (6 + 4 * sorts) * rows, (4, 4))


def _lookup(tally: PartSeconds, operation: Elementwise, shape: Shape, engine: EngineProfile) -> None:
    """Rows of the table, and, where that is trained, their scattered addition backward."""
    rows, trains = _moved(operation, shape), not operation.frozen
    tally.memory(2 * rows, 3 * rows * trains, (2, 3 * trains))


def _logits(tally: PartSeconds, operation: LinearOp, vocab: Num, shape: Shape, engine: EngineProfile) -> None:
    """The product with a rank's `vocab` rows of the vocabulary, the loss over it."""
    wide = replace(shape, dtype=shape.wide)
    deep, trains = operation.inputs.size, not operation.frozen
    tally.linear(shape.tokens, vocab, deep, wide, added=adds_apart(engine), trains=trains)
    logits = shape.tokens * vocab * shape.width
    if engine.metric_losses:
        tally.memory(engine.metric_losses * METRIC_PASSES * logits, 0.0, (3 * engine.metric_losses, 0))
    if engine.fused_loss:
        ahead, back = engine.loss_passes
        tally.memory(ahead * logits, back * logits, (3, 2), "loss")
    else:
        # fp32 copy (3), maximum (2), difference (4), exponential (4), sum (2), quotient (4); then product and cast.
        tally.memory(19 * logits, 7 * logits, (12, 4), "loss")


_PASSES: dict[str, tuple[float, float, tuple[int, int], str]] = {
    "scale": (2, 2, (1, 1), ""),
    # Quotient, tanh and product; backward the square of what came out, less one, times the gradient.
    "soft cap": (6, 7, (3, 3), ""),
    # Norms of both low ranks; laying out heads whose rotated part is shared.
    "low ranks": (2, 3, (2, 3), ""),
    "shared key": (2, 3, (2, 3), ""),
    "split heads": (0, 2, (0, 1), "qkv_copied"),
    "dropout": (2.5, 2.5, (1, 1), "dropout"),
}
"""Kind of operation -> passes over its tensors forward and backward, kernels, and the field of an engine that has them;
empty where all engines do."""

_ELEMENTWISE: dict[str, Callable[[PartSeconds, Elementwise, Shape, EngineProfile], None]] = {
    "lookup": _lookup,
    "rmsnorm": _norm,
    "layernorm": _norm,
    "branch norm": _branch_norm,
    "head norms": _head_norms,
    "joint norms": _head_norms,
    **dict.fromkeys(_PASSES, _passes),
    "bias gradients": _bias_gradients,
    "rotation": _rotation,
    "residual": _residual,
    "dispatch": _dispatch,
    "activation": _activation,
    "gated activation": _activation,
}


def padded_vocab(model: ModelConfig, engine: EngineProfile, tp: Num) -> Num:
    """Rows of the embedding as the engine pads them."""
    multiple = engine.vocab_multiple * tp if engine.vocab_multiple > 1 else tp
    return np.ceil(model.vocab / multiple) * multiple
