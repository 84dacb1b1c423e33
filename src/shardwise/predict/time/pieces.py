"""Time of one micro-batch on one rank: a block, the embedding and the head, with the collectives inside a block.

Depends on few numbers of a split (`BLOCK_DEPENDS_ON`): over many candidates each combination is computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np

from shardwise.arrays import Num
from shardwise.layout.keys import APART, KEYS
from shardwise.layout.layout import cut_layout, traced_cut
from shardwise.layout.tensor import EDGES, collectives
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Blueprint, Part
from shardwise.model.config import Experts
from shardwise.model.parameters import Model, blueprint
from shardwise.predict.time.block import PartSeconds, Shape, core_of, core_width, routed, tally_part
from shardwise.predict.time.experts import exchange_seconds
from shardwise.predict.time.gradients import product_bytes
from shardwise.predict.time.kernels import WIDTH
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.time.split import CUTS_OF_STAGES, StepShape
from shardwise.predict.time.traced import KINDS as TRACED_KINDS
from shardwise.predict.time.traced import TracedTimes
from shardwise.records import dataclass

Parts = dict[str, Num]
"""Seconds by kind."""

BLOCK_DEPENDS_ON = ("micro", "tp", "cp", "ep", "sp", "recompute")
"""Keys of a split on which `Pieces` depend, besides the length of sequences and the data type, in 16 bits or fewer."""

COLLECTIVE_LAUNCHES = 1
"""Launches that the host's part of one collective counts for."""


def total(parts: Parts, *but: str) -> Num:
    """All kinds together, without some."""
    return sum(seconds for name, seconds in parts.items() if name not in but)


@dataclass(frozen=True)
class Pieces:
    """Time of one micro-batch on one rank, in seconds by kind, and "host", what the host needs meanwhile: of a block
    (the model's mean), of the embedding, of the head.

    forward, weights: of a block's seconds, those of its forward pass, and of its weights' gradients, which a schedule
    may put off. ahead: of the forward ones, collectives over tp and cp.
    """

    block: Parts
    first: Parts
    last: Parts
    forward: Num
    weights: Num
    ahead: Num = 0.0

    def each(self, change: Callable[[Any], Num]) -> Pieces:
        """A copy with every array changed."""

        def changed(value: Any) -> Any:
            return {k: change(v) for k, v in value.items()} if isinstance(value, dict) else change(value)

        return Pieces(*(changed(getattr(self, field.name)) for field in fields(self)))

    def joined(self) -> Pieces:
        """A copy with the kinds of computation and the tensor-parallel collectives added up, under "matmul"."""

        def join(parts: Parts) -> Parts:
            apart = {name: parts[name] for name in ("experts", "host") if name in parts}
            return {"matmul": total(parts, *apart)} | apart

        return replace(self, block=join(self.block), first=join(self.first), last=join(self.last))


def pieces(model: Model, split: StepShape, engine: EngineProfile, pricing: Pricing) -> Pieces:
    """The pieces of a split, each combination of what they depend on computed once: candidates by the hundred thousand
    have a few dozen of them."""
    # Of wide types alone, products add to gradients of earlier micro-batches.
    names = (*BLOCK_DEPENDS_ON, "micro_batches", "zero") if split.width > 2 else BLOCK_DEPENDS_ON
    if np.any(np.asarray(split.recompute) == "input"):
        names = (*names, *CUTS_OF_STAGES)
    arrays = np.broadcast_arrays(*(getattr(split, name) for name in names))
    if arrays[0].size < 64:
        return _pieces(model, split, engine, pricing)
    key = np.zeros(arrays[0].shape, dtype=np.int64)
    for array in arrays:
        number = np.unique(array, return_inverse=True)[1].reshape(array.shape)
        key = key * (int(number.max()) + 1) + number
    _, where, inverse = np.unique(key, return_index=True, return_inverse=True)
    inverse = inverse.reshape(key.shape)
    numbers: dict[str, Any] = {name: array.ravel()[where] for name, array in zip(names, arrays, strict=True)}
    few = _pieces(model, replace(split, **numbers), engine, pricing)
    return few.each(lambda piece: np.broadcast_to(piece, where.shape)[inverse])


def _traced(model: Blueprint, split: StepShape, engine: EngineProfile, pricing: Pricing) -> Pieces:
    """Pieces of a traced module: its blocks, and what its root computes before and behind them. Of the products of a
    block's backward pass half are of weights."""
    hidden = pricing.constants.value("tensor_hidden") if engine.tensor_overlap else 0.0
    beside = pricing.constants.value("tensor_hidden") if engine.ring_overlap else 0.0
    times = cache(TracedTimes(model, pricing, split.dtype, hidden, beside).of)
    cut_of = cache(lambda *apart: traced_cut(cut_layout(dict(zip(APART, apart, strict=True)))))
    apart = [vars(split).get(name, split.apart.get(name, KEYS[name].default)) for name in APART]
    arrays = np.broadcast_arrays(*recomputed(model, split), split.tp, split.micro, split.sp, *apart)
    rows = zip(*(array.ravel().tolist() for array in arrays), strict=True)
    found = [
        (*times(tp, micro, sp, cut_of(*cut)), {**dict.fromkeys(TRACED_KINDS, whole), "attention": whole + core})
        for whole, core, tp, micro, sp, *cut in rows
    ]

    def column(of: Callable[..., Num]) -> Num:
        return np.array([of(*parts, again=again) for *parts, again in found]).reshape(arrays[0].shape)

    def block_of(kind: str) -> Num:
        return column(lambda block, *ends, again: (1 + again[kind]) * block.forward[kind] + block.backward[kind])

    def end_of(which: int) -> Parts:
        def of(kind: str) -> Num:
            return column(lambda block, *ends, again: ends[which].forward[kind] + ends[which].backward[kind])

        return {kind: of(kind) for kind in TRACED_KINDS}

    forward = column(lambda block, *ends, again: sum(block.forward.values()) - block.forward["host"])
    weights = column(lambda block, *ends, again: block.backward["matmul"] / 2)
    return Pieces({kind: block_of(kind) for kind in TRACED_KINDS}, end_of(0), end_of(1), forward, weights)


def _pieces(model: Model, split: StepShape, engine: EngineProfile, pricing: Pricing) -> Pieces:
    if isinstance(model, Blueprint):
        return _traced(model, split, engine, pricing)
    gathers = split.tpkind == "gathered"
    shape = Shape(
        micro=split.micro,
        seq=split.seq / split.cp,
        tp=1 if gathers else split.tp,
        pieces=split.tp if gathers else 1,
        stream=split.micro * split.seq / split.cp / np.where(split.sp, split.tp, 1),
        keys=split.seq,
        ep=split.ep,
        dtype=split.dtype,
        expert_tp=split.expert_tp,
        routes=split.micro * split.seq / split.cp / np.where(split.expert_tp > 1, 1, split.tp),
        ring=split.cp if split.cpkind == "ring" else 1,
        weight_bytes=product_bytes(split, engine),
    )
    embedding, *_, head = blueprint(model).parts
    per_block: dict[str, Num] = {}
    for part, count in blueprint(model).distinct_blocks:
        one = _block_seconds(part, model, shape, split, engine, pricing)
        per_block = {name: per_block.get(name, 0.0) + one[name] * (count / model.layers) for name in one}
    forward, weights, ahead = (per_block.pop(name) for name in ("forward", "weights", "ahead"))
    entry, loss = (tally_part(end, model, shape, engine, pricing.kernels) for end in (embedding, head))
    summed, gathered = _ends(model, shape, split, engine, pricing, loss.weights)
    first, last = _edge(entry, summed), _edge(loss, gathered)
    return Pieces(per_block, first, last, forward, weights, ahead)


def _block_seconds(part: Part, model: ModelConfig, shape: Shape, split: StepShape, engine: EngineProfile,
                   pricing: Pricing) -> Parts:  # fmt: skip
    """Forward, backward and recomputation of one block for one micro-batch, with what it waits for; and apart, how
    much of it is the forward pass and the weights' gradients."""
    tally = tally_part(part, model, shape, engine, pricing.kernels)
    whole, core = recomputed(model, split)
    parts = {
        kind: tally.forward[kind] + tally.backward[kind] + whole * tally.forward[kind] + core * tally.selective[kind]
        for kind in tally.forward
    }
    ahead, back = _tensor(part, model, shape, split, engine, pricing, tally)
    around = _context(model, shape, split, engine, pricing, tally)
    merged = _merged(model, shape, split, engine, pricing)
    ahead, back = ahead + around[0] + merged[0], back + around[1] + merged[1]
    parts["tensor"] = ahead + back
    busy = sum(parts.values())
    parts["experts"] = _exchanged(part, model, shape, split, engine, pricing, busy)
    repeated = whole * tally.launches["forward"] + core * tally.launches["selective"]
    collectives = np.where(np.asarray(split.tp) > 1, 4 + 2 * whole, 0)
    launches = tally.launches["forward"] + tally.launches["backward"] + repeated + COLLECTIVE_LAUNCHES * collectives
    called = launches * pricing.constants.value("launch_s")
    parts["host"] = called + _host_of_experts(part, shape, engine, pricing, whole)
    parts["forward"] = sum(tally.forward.values()) + ahead + parts["experts"] / 2
    parts["weights"] = tally.weights + 0.0 * ahead
    parts["ahead"] = ahead
    return parts


def recomputed(model: Model, split: StepShape) -> tuple[Num, Num]:
    """How often a block's whole forward pass is computed again, in the mean over a stage's blocks, and how often its
    attention core alone is. From the first one's input, each block is recomputed for all behind it, too."""
    recompute = np.asarray(split.recompute)
    whole, core = 1.0 * (recompute == "full"), 1.0 * (recompute == "selective")
    if np.any(recompute == "input"):
        for_all = (split.stage_blocks(model.layers) + 1) / 2
        whole = np.where(recompute == "input", for_all, whole)
    return whole, core


def _edge(tally: PartSeconds, tensor: Num) -> Parts:
    parts = {kind: tally.forward[kind] + tally.backward[kind] for kind in tally.forward}
    called = (tally.launches["forward"] + tally.launches["backward"]) * tally.kernels.constants.value("launch_s")
    return parts | {"tensor": tensor, "host": called}


def _tensor(part: Part, model: ModelConfig, shape: Shape, split: StepShape, engine: EngineProfile,
            pricing: Pricing, tally: PartSeconds) -> tuple[Num, Num]:  # fmt: skip
    """Exposed collectives of a block over tp and cp, forward and backward: sums (Shoeybi et al. 2019), under
    sp scatters, with gathers that come again in backward (Korthikanti et al. 2022). Hidden ones have products beside
    them, and last no longer: gradients of weights, or under `tensor_pipelined` those of their pass."""
    name = "tensor_piped" if engine.tensor_pipelined else "tensor_hidden" if engine.tensor_overlap else ""
    hidden = pricing.constants.value(name) if name else 0.0
    whole = recomputed(model, split)[0]
    if split.tpkind == "gathered":
        # The collectives of a block where every map's outputs are gathered, forward and backward.
        seconds: dict[str, Num] = {"forward": 0.0, "backward": 0.0}
        for operation in part.operations:
            for phase, op, width in collectives(operation, EDGES["gathered"], split.tp):
                taken = pricing.collectives.seconds(op, shape.tokens * width * split.width, split.tp)
                seconds[phase] = seconds[phase] + taken
        forward, backward = seconds["forward"], seconds["backward"]
        return forward, forward * whole + backward - np.minimum(hidden * backward, tally.weights)
    gather, scatter = _sequences(model, shape, split, pricing)
    if engine.gathers_narrow and shape.narrow:
        gather = gather * WIDTH[shape.dtype] / shape.width
    # Where tp splits experts, too, their tokens enter and leave as those of another cut part.
    experts = 1.0 * (np.asarray(split.expert_tp) > 1) if routed(part) else 0.0
    gathered, summed = part.gathered + experts, part.summed + experts
    # The sums of squares that norms over all heads need, and in backward sums as large.
    price = pricing.collectives.seconds
    statistics = sum((price("all_reduce", 4.0 * n * shape.tokens, split.tp) for n in part.statistics), 0.0)
    forward = gathered * gather + summed * scatter + statistics
    # Of backward's, the gathers that come again for weights' gradients have nothing beside them.
    again = gathered * gather * engine.gathers_again
    exposed_back = again + forward - np.minimum(hidden * forward, tally.weights)
    if engine.tensor_pipelined:
        exposed_back = again + forward - np.minimum(hidden * (again + forward), tally.backward["matmul"])
        forward = forward - np.minimum(hidden * forward, tally.forward["matmul"])
    joined = _slices(part, model, shape, split, pricing)
    return forward + joined, (forward + joined) * whole + exposed_back + joined


def _slices(part: Part, model: ModelConfig, shape: Shape, split: StepShape, pricing: Pricing) -> Num:
    """The gather of what experts return, forward, or of its gradient, where tensor-parallel ranks have the same tokens
    and route a part of them each."""
    if not routed(part):
        return 0.0
    ranks = np.where(np.asarray(split.sp) | (np.asarray(split.expert_tp) > 1), 1, split.tp)
    return pricing.collectives.seconds("all_gather_into", shape.tokens * model.hidden * split.width, ranks)


def _sequences(model: ModelConfig, shape: Shape, split: StepShape, pricing: Pricing) -> tuple[Num, Num]:
    """The collectives over tp on a micro-batch's whole stream: the gather of its shards, under sp alone; and the sum,
    which sp scatters."""
    price = pricing.collectives.seconds
    full = shape.tokens * model.hidden * split.width
    sp = np.asarray(split.sp)
    sharded, whole = np.where(sp, split.tp, 1), np.where(sp, 1, split.tp)
    scatter = price("reduce_scatter", full, sharded) + price("all_reduce", full, whole)
    return price("all_gather_into", full, sharded), scatter


def _ends(
    model: ModelConfig, shape: Shape, split: StepShape, engine: EngineProfile, pricing: Pricing, weights: Num
) -> tuple[Num, Num]:
    """Exposed collectives over tp of the embedding, whose rows are summed, and of the head with its loss: the input is
    gathered, forward and again in backward, its gradient summed, beside that of its weights, and of each token the
    maximum, the sum and the target's logit (Shoeybi et al. 2019, section 3)."""
    if np.all(np.asarray(split.tp) == 1):
        return 0.0, 0.0
    hidden = pricing.constants.value("tensor_hidden") if engine.tensor_overlap else 0.0
    gather, scatter = _sequences(model, shape, split, pricing)
    tokens = [pricing.collectives.seconds("all_reduce", 4.0 * n * shape.tokens, split.tp) for n in (1, 2)]
    return gather + scatter, 2 * gather + scatter - np.minimum(hidden * scatter, weights) + sum(tokens)


def _merged(
    model: ModelConfig, shape: Shape, split: StepShape, engine: EngineProfile, pricing: Pricing
) -> tuple[Num, Num]:
    """Passes over memory that merge a ring's pieces of attention, forward (again where that is) and backward."""
    steps = np.asarray(split.cp) - 1
    if not np.any(steps > 0) or not engine.ring_bytes[0] or split.cpkind == "ulysses":
        return 0.0, 0.0
    elements = steps * shape.tokens * model.heads / split.tp * core_width(core_of(model))
    ahead, back = (pricing.kernels.pass_over(elements * nbytes) for nbytes in engine.ring_bytes)
    again = sum(recomputed(model, split))
    return np.where(steps > 0, ahead, 0.0), np.where(steps > 0, back + again * ahead, 0.0)


def _context(
    model: ModelConfig, shape: Shape, split: StepShape, engine: EngineProfile, pricing: Pricing, tally: PartSeconds
) -> tuple[Num, Num]:
    """Exposed time of the messages over cp, forward and backward; a core that is computed again has the
    forward ones again (`traffic.context_rows` counts them)."""
    if not np.any(np.asarray(split.cp) > 1):
        return 0.0, 0.0
    kv = np.maximum((model.heads if engine.kv_repeated else model.kv_heads) / split.tp, 1)
    head = shape.micro * split.seq * core_width(core_of(model)) * split.width  # bytes of a head, of all ranks' tokens
    again = sum(recomputed(model, split))

    def price(op: str, nbytes: Num) -> Num:
        return pricing.collectives.seconds(op, nbytes, split.cp, split.tp)

    if split.cpkind == "ulysses":
        heads = model.heads / split.tp
        sent = heads + 2 * kv * np.maximum(split.cp / kv, 1), heads
        once = sum(price("all_to_all", head / split.cp * n) for n in sent)
        return once, once * (1 + again)
    if split.cpkind == "allgather":
        gathered = price("all_gather_into", 2 * head * kv)
        return gathered, gathered * (1 + again) + price("reduce_scatter", 2 * head * kv * 4.0 / split.width)
    return _ring(2 * head * kv / np.asarray(split.cp), again, model, shape, split, engine, pricing, tally)


def _ring(
    nbytes: Num, again: Num, model: ModelConfig, shape: Shape, split: StepShape, engine: EngineProfile,
    pricing: Pricing, tally: PartSeconds,
) -> tuple[Num, Num]:  # fmt: skip
    """The ring that keys and values go around, forward and backward. nbytes: of a rank's keys and values; again:
    whether the core is computed again.

    A rank attends to one of cp pieces while the next one comes: of cp pieces of attention, cp - 1 have a message beside
    them (Liu et al. 2023, section 3). Backward, gradients of keys and values go around with them, in fp32 and one step
    further, home. A step takes as long as the message that has the farthest to go.
    """
    ranks = np.asarray(split.cp)
    ahead = sum(tally.selective.values())
    back = ahead * pricing.kernels.attention_ratio(model.head_dim, shape.keys, shape.wide)
    hidden = pricing.constants.value("tensor_hidden") if engine.ring_overlap else 0.0
    covered = 1 - 1 / ranks

    def hop(nbytes: Num) -> Num:
        return pricing.collectives.hop(nbytes, split.tp, ranks)

    def left(messages: Num, busy: Num) -> Num:
        return np.where(ranks > 1, messages - hidden * np.minimum(messages, busy), 0.0)

    forward = (ranks - 1) * hop(nbytes)
    backward = (1 + again) * forward + ranks * hop(nbytes * 4.0 / split.width)
    return left(forward, ahead * covered), left(backward, back * covered)


def _exchanged(
    part: Part, model: ModelConfig, shape: Shape, split: StepShape, engine: EngineProfile, pricing: Pricing, busy: Num
) -> Num:
    """Exposed time of tokens to their experts and back, forward and backward; again where the forward pass is.

    busy: seconds of the block's computation. Where an engine runs two micro-batches beside each other, that of one has
    the other's exchange beside it, which slows it.
    """
    if not routed(part):
        return 0.0 * busy
    assert model.experts
    one = exchange_seconds(model.experts, shape.routed, model.hidden, split.ep, engine, pricing)
    again = recomputed(model, split)[0]
    seconds = (4 + 2 * again) * one + _counted(model.experts, split, engine, pricing, again)
    if not engine.exchange_overlap:
        return seconds
    return np.maximum(seconds - busy, 0.0) + pricing.constants.value("contention") * np.minimum(seconds, busy)


def _counted(experts: Experts, split: StepShape, engine: EngineProfile, pricing: Pricing, again: Num) -> Num:
    """Seconds of what ranks send each other about a block's routing: numbers of rows before each exchange, and every
    expert's load for the balance losses."""
    price, nbytes, everywhere = pricing.collectives.seconds, 8.0 * experts.count, experts.balance == "global"
    rows = (1 + again) * price("all_to_all", nbytes, split.ep) if engine.exchange == "rows" else 0.0
    if not (experts.balance_loss or experts.z_loss):
        return rows
    loads = nbytes * (1 if everywhere else split.micro)
    return rows + price("all_reduce", loads, split.routing_ranks(everywhere), split.expert_tp)


def _host_of_experts(part: Part, shape: Shape, engine: EngineProfile, pricing: Pricing, whole: Num) -> Num:
    """Seconds of the host for one block's exchange of tokens, and for kernels that are launched expert by expert."""
    product = routed(part)
    if not product or "experts" in engine.captured:
        return 0.0
    forward, backward = engine.exchange_launches
    apart = np.asarray(shape.ep) > 1
    called = ((1 + whole) * forward + backward + engine.overlap_launches * engine.exchange_overlap) * apart
    kernels = np.maximum(product.count / shape.ep, 1) * engine.expert_kernels[shape.narrow]
    known = pricing.constants
    return called * known.value("launch_s") + kernels * known.value("kernel_launch_s")
