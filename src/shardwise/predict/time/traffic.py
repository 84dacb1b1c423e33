"""Time of the data ranks' collectives and of a message between stages, each alone and once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardwise.arrays import Num
from shardwise.layout import Layout
from shardwise.layout.axes import KV, TP
from shardwise.layout.placement import place
from shardwise.layout.unit import GRADIENT_BITS, WEIGHT_BITS
from shardwise.layout.wire import BLOCK, SCALE
from shardwise.model.blueprint import Blueprint
from shardwise.model.parameters import Model, blueprint
from shardwise.predict.time.block import padded_vocab
from shardwise.predict.time.gradients import accumulator_width, reduced_width
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.predict.time.split import StepShape
from shardwise.predict.time.traced import handed_elements
from shardwise.records import dataclass


@dataclass(frozen=True)
class Traffic:
    """Seconds of each kind of collective, and of a message between stages.

    reduce, gather: all gradients to who updates them, all parameters back, below stage 3. replicas: sums over the
    groups that hold the same shards (HSDP). unit_gather, unit_reduce: of one block, at stage 3; table_gather,
    table_reduce: of a vocabulary's table there; unit_again, table_again: a later gather of the step, which under hpz is
    over fewer ranks. tied: the sum of a tied table's gradients over the ends of a pipeline. partial: of a block, sums
    over tp of gradients that each of its ranks has a part of. unit_copies: of a block at stage 3, copies on the device
    beside a gather and beside a reduction.
    hop: one message between stages.
    """

    reduce: Num
    gather: Num
    replicas: Num
    unit_gather: Num
    unit_reduce: Num
    unit_again: Num
    table_gather: Num
    table_reduce: Num
    table_again: Num
    tied: Num
    partial: Num
    unit_copies: tuple[Num, Num]
    hop: Num

    def where(self, here: Num, other: Traffic) -> Traffic:
        """This traffic's seconds where `here` is true, else the other's."""

        def chosen(mine: Any, its: Any) -> Any:
            return tuple(map(chosen, mine, its)) if isinstance(mine, tuple) else np.where(here, mine, its)

        return Traffic(*(chosen(getattr(self, name), getattr(other, name)) for name in vars(self)))


def traffic(model: Model, split: StepShape, engine: EngineProfile, pricing: Pricing) -> Traffic:
    """The traffic of a split. It does not depend on its schedule and its recomputation, and on the number of its
    micro-batches only in that several are summed in a wider type (`StepShape.gradient_width`)."""
    price, data, zero = pricing.collectives.seconds, split.dp * split.cp, np.asarray(split.zero)
    dense, routed = held_parameters(model, split, engine)
    grad_bytes, split_up = reduced_width(split, engine), np.where(zero == 3, split.shard, 1)
    unit, trained = (_held_by_blocks(model, split, which) / model.layers for which in (False, True))
    unit_routed = block_parameters(model, split)[1] / model.layers
    owners = np.where(zero == 0, data, split.shard)
    reduce, gather, replicas, unit_gather, unit_reduce = _state_traffic(
        (dense, unit, trained), (data, owners, split.tp), model.layers, split, engine, pricing, _reduced
    )

    def again(elements: Num, first: Num) -> Num:
        near = price("all_gather_into", elements * split.width, split.near, split.tp)
        return np.where(split.copied, near, first)

    unit_again = again(unit, unit_gather)
    if np.any(np.asarray(unit_routed)):
        there, group = np.asarray(unit_routed) > 0, (split.expert_data, split.expert_shard, split.expert_apart)
        of_experts = [
            np.where(there, x, 0.0)
            for x in _state_traffic(
                (routed, unit_routed, unit_routed), group, model.layers, split, engine, pricing, _summed
            )
        ]
        reduce, gather, replicas = reduce + of_experts[0], gather + of_experts[1], replicas + of_experts[2]
        unit_gather, unit_reduce = unit_gather + of_experts[3], unit_reduce + of_experts[4]
        unit_again = unit_again + of_experts[3]
    table = table_held(model, split, engine)
    table_gather = _gathered(table, split_up, split.tp, split, pricing)
    return Traffic(
        reduce, gather, replicas, unit_gather, unit_reduce, unit_again, table_gather,
        _reduced(table_held(model, split, engine, trained=True), grad_bytes, split_up, split.tp, split, pricing),
        again(table, table_gather), _tied(model, split, engine, pricing), _partial(model, split, engine, pricing),
        _copies(unit + unit_routed, trained + unit_routed, split_up, split, engine, pricing),
        _hop(model, split, engine, pricing),
    )  # fmt: skip


def _copies(
    gathered: Num, reduced: Num, ranks: Num, split: StepShape, engine: EngineProfile, pricing: Pricing
) -> tuple[Num, Num]:
    """Seconds of a block's copies on the device (beside a gather, beside a reduction). ranks: that shard it. Shards of
    wide types need no conversion."""
    whole, shard = engine.gather_copies
    beside = gathered * (whole + shard * (split.width < 4) / ranks), reduced * engine.reduce_copies + 0.0 * ranks
    return tuple(np.where((ranks > 1) & (n > 0), pricing.kernels.pass_over(n), 0.0) for n in beside)  # type: ignore[return-value]


def _state_traffic(
    elements: tuple[Num, Num, Num], group: tuple[Num, Num, Num], layers: int, split: StepShape, engine: EngineProfile,
    pricing: Pricing, reduced: Callable[..., Num],
) -> tuple[Num, Num, Num, Num, Num]:  # fmt: skip
    """Collectives of all but the experts, or of these alone: reduce, gather, replicas, unit_gather, unit_reduce.
    elements: trained on a rank; of a block, gathered and reduced. group: ranks that hold the same, those of them that
    share its state, and their distance. reduced: the sum over these."""
    (trained, unit, of_unit), (data, owners, apart) = elements, group
    price, zero, grad_bytes = pricing.collectives.seconds, np.asarray(split.zero), reduced_width(split, engine)
    whole, partly = np.where(zero == 0, data, 1), np.where((zero == 1) | (zero == 2), owners, 1)
    groups = np.where(zero == 0, 1, np.maximum(data // owners, 1))
    split_up, wide = np.where(zero == 3, owners, 1), accumulator_width(split, engine)

    def over_all(seconds: Callable[[Num], Num]) -> Num:
        """Of all that a rank trains: unit by unit, or as if it were one. Tables are units, too."""
        blocks = split.layers_held(layers)[0] if engine.by_unit else 0
        rest = np.maximum(trained - blocks * of_unit, 0.0)
        return blocks * seconds(of_unit) + np.where(rest > 0, seconds(rest), 0.0)

    return (
        over_all(lambda n: price("all_reduce", n * grad_bytes, whole, apart)
                 + reduced(n, grad_bytes, partly, apart, split, pricing)),
        over_all(lambda n: price("all_gather_into", n * split.width, partly, apart)),
        over_all(lambda n: price("all_reduce", n * wide / owners, groups, apart * owners)),
        _gathered(unit, split_up, apart, split, pricing),
        reduced(of_unit, grad_bytes, split_up, apart, split, pricing),
    )  # fmt: skip


PACKED = {bits: bits / 8 + SCALE / BLOCK for bits in (WEIGHT_BITS, GRADIENT_BITS)}
"""Bits -> bytes of an element on the wire, its part of a scale included."""
UNPACKING, PACKING, ADDING, FEEDING = 23, 54, 37, 49
"""Bytes that move to and from memory for each weight that is unpacked, each gradient that is packed, each that is
unpacked and added, and each whose error is fed back, which unpacks it once more (runtime/zero/quantized.py, one
operation after the other)."""


def _gathered(elements: Num, ranks: Num, apart: Num, split: StepShape, pricing: Pricing) -> Num:
    """A gather of weights over all shards, under qwz packed, and unpacked again."""
    if not split.qwz:
        return pricing.collectives.seconds("all_gather_into", elements * split.width, ranks, apart)
    sent = pricing.collectives.seconds("all_gather_into", elements * PACKED[WEIGHT_BITS], ranks, apart)
    return sent + np.where(ranks > 1, _converted(elements * UNPACKING, "unpacking", split, pricing), 0.0)


def _reduced(elements: Num, grad_bytes: Num, ranks: Num, apart: Num, split: StepShape, pricing: Pricing) -> Num:
    """The sum of gradients over a shard group; packed ones take two hops where few ranks are near each other."""
    if not split.qgz or not np.any(split.copied):
        return _summed(elements, grad_bytes, ranks, apart, split, pricing)
    near = np.where(ranks > 1, split.near, 1)
    first = _summed(elements, grad_bytes, near, apart, split, pricing)
    return first + _summed(elements / near, grad_bytes, ranks // near, apart * near, split, pricing)


def _summed(elements: Num, grad_bytes: Num, ranks: Num, apart: Num, split: StepShape, pricing: Pricing) -> Num:
    price = pricing.collectives.seconds
    if not split.qgz:
        return price("reduce_scatter", elements * grad_bytes, ranks, apart)
    sent = price("all_to_all", elements * PACKED[GRADIENT_BITS], ranks, apart)
    passes = _converted(elements * PACKING, "packing", split, pricing)
    passes = passes + _converted(elements * (ADDING + FEEDING * split.feedback), "unpacking", split, pricing)
    return sent + np.where(ranks > 1, passes, 0.0)


def _converted(nbytes: Num, of: str, split: StepShape, pricing: Pricing) -> Num:
    """Passes over memory before and after a collective, which need a core where the collective itself needs none.
    of: packing or unpacking, whose share of the bandwidth a measured device has."""
    if not pricing.packs:
        return 0.0
    waiting = np.where(leaves_node(split, pricing), core_wait(split, pricing), 0.0)
    return pricing.kernels.pass_over(nbytes, of, "float32") * (1.0 + waiting)


def _tied(model: Model, split: StepShape, engine: EngineProfile, pricing: Pricing) -> Num:
    if not model.tied:
        return 0.0
    table = held_elements(model, split.tp).shared if model.trace else table_held(model, split, engine, trained=True)
    if not np.any(table):
        return 0.0
    piped, stride = np.asarray(split.pp) > 1, split.stage_ranks
    nbytes = table * accumulator_width(split, engine)
    if engine.tied_apart:
        sent = nbytes / np.where(np.asarray(split.zero) > 0, split.shard, 1)
        return np.where(piped, pricing.collectives.hop(sent, stride, split.pp), 0.0) if np.any(piped) else 0.0
    apart = stride * np.maximum(split.pp - 1, 1)
    return pricing.collectives.seconds("all_reduce", nbytes, np.where(piped, 2, 1), apart)


def _partial(model: Model, split: StepShape, engine: EngineProfile, pricing: Pricing) -> Num:
    if np.all(np.asarray(split.tp) == 1):
        return 0.0
    blocks = 1 if engine.by_unit else split.layers_held(model.layers)[0]
    width, seconds = blocks * reduced_width(split, engine) / model.layers, 0.0 * np.asarray(split.tp)
    for sp in (False, True):
        held = held_elements(model, split.tp, sp=sp)
        for elements, ranks in ((held.partial, split.tp), (held.repeated, held.holders)):
            sums = pricing.collectives.seconds("all_reduce", elements * width, ranks) / blocks
            seconds = seconds + np.where((np.asarray(split.sp) == sp) & (elements > 0), sums, 0.0)
    return seconds


def _hop(model: Model, split: StepShape, engine: EngineProfile, pricing: Pricing) -> Num:
    sp = np.asarray(split.sp)
    if np.all(np.asarray(split.pp) == 1):
        return 0.0
    pieces = np.where(sp | engine.scatter_hops, split.tp, 1)
    if model.trace:
        elements = handed_elements(model, split.micro) / split.cp
    else:
        elements = split.micro * split.seq / split.cp * model.hidden
    nbytes = elements * split.width / pieces
    hop = pricing.collectives.hop(nbytes, split.stage_ranks, split.pp)
    if not engine.scatter_hops:
        return hop
    return hop + pricing.collectives.seconds("all_gather_into", nbytes * split.tp, np.where(sp, 1, split.tp))


class HeldElements(NamedTuple):
    """Parameters on one tensor-parallel rank, as if no other axis cut them."""

    dense: Num
    """Of all blocks, but for experts and what is narrow."""
    narrow: Num
    """Bytes of frozen matrices of all blocks in narrower types."""
    experts: Num
    root: Num
    end: Num
    """Under a pipeline, of the larger one of entry and exit."""
    shared: Num
    """Of a table that both of these have."""
    partial: Num
    """Of all blocks: their gradients are partial on each tensor-parallel rank, and summed over these."""
    repeated: Num
    """The same over the ranks that have the same key/value head."""
    holders: Num
    """How many these are."""


def held_elements(model: Model, tp: Num, trained: bool = True, sp: bool = False) -> HeldElements:
    """Parameters on each of `tp` ranks. trained: without frozen ones; sp: under sequence parallelism."""
    degrees = np.asarray(tp, dtype=int)
    found = {degree: _held(model, degree, trained, sp and degree > 1) for degree in set(degrees.ravel().tolist())}
    rows = np.zeros((max(found) + 1, len(HeldElements._fields)))
    rows[list(found)] = list(found.values())
    return HeldElements(*np.moveaxis(rows[degrees], -1, 0))


@lru_cache(maxsize=512)
def _held(model: Model, tp: int, trained: bool, sp: bool) -> HeldElements:
    whole, layout = blueprint(model).piped, Layout(tp=tp, sp=sp)
    if whole.trace and sp:  # what it adds is in the description (`unit_plan`)
        whole, layout = whole.on_shards, Layout(tp=tp)
    held, shared, sums, holders = Counter[str](), 0, Counter[Any](), 1
    for part in whole.parts:
        for parameter in (p for p in part.parameters if not (trained and p.frozen)):
            placed = place(parameter, layout, 0)
            numel = placed.numel * part.count
            kind = "narrow" if parameter.dtype else "experts" if parameter.cut == "expert" else part.kind
            held[kind] += numel
            shared += numel * (parameter.name in whole.shared)
            sums[placed.sum_over if part.kind == "block" else ()] += numel
            holders = placed.replicas if placed.sum_over == KV else holders
    root, end = held["root"] + held["entry"] + held["exit"], max(held["entry"], held["exit"] + shared)
    return HeldElements(held["block"], held["narrow"], held["experts"], root, end, shared, sums[TP], sums[KV], holders)


def held_parameters(model: Model, split: StepShape, engine: EngineProfile) -> tuple[Num, Num]:
    """Trained parameters of the busiest rank: (all but the experts', the experts')."""
    blocks, routed = block_parameters(model, split)
    tables = table_parameters(model, split, engine)
    share = split.layers_held(model.layers)[0] / model.layers
    return blocks * share + tables, routed * share + 0.0 * blocks


def block_parameters(model: Model, split: StepShape) -> tuple[Num, Num]:
    """Trained parameters of all blocks on one of the ranks that cut them: (all but the experts', the experts')."""
    spread = np.where(_experts_stay(model, split), 0.0, held_elements(model, 1).experts)
    return _held_by_blocks(model, split), spread / split.expert_apart


def _experts_stay(model: Model, split: StepShape) -> Any:
    """Whether experts are parameters of their block: a module's, unless ep spreads them."""
    return ~np.asarray(split.spreads_experts) if model.trace else False


def _held_by_blocks(model: Model, split: StepShape, trained: bool = True) -> Num:
    """Parameters of all blocks on each of `tp` ranks, without experts that are spread apart; narrow ones as so many of
    the layout's precision."""
    held = held_elements(model, split.tp, trained)
    return held.dense + held.narrow / split.width + np.where(_experts_stay(model, split), held.experts, 0.0)


def table_held(model: Model, split: StepShape, engine: EngineProfile, trained: bool = False) -> Num:
    """Parameters of one of the vocabulary's tables on a rank; of a traced module, of its root, or of an end of it."""
    if isinstance(model, Blueprint):
        held = held_elements(model, split.tp, trained)
        return np.where(np.asarray(split.pp) == 1, held.root, held.end)
    if trained and blueprint(model).table.frozen:
        return 0.0 * np.asarray(split.tp)
    return padded_vocab(model, engine, split.tp) * model.hidden / split.tp


def table_parameters(model: Model, split: StepShape, engine: EngineProfile) -> Num:
    """Trained parameters of the vocabulary's tables on the busiest rank."""
    return table_held(model, split, engine, trained=True) * np.where(
        np.asarray(split.pp) == 1, 1 if model.tied else 2, 1
    )


def core_wait(split: StepShape, pricing: Pricing) -> Num:
    """Seconds of waiting per second of a rank's computation, as `calibrate device` measured it; 0 on a GPU.

    Where a machine has more ranks than cores, all wait equally for each other ("shared"). Other programs hold up one
    rank now and then ("taken"), and with it all that meet it in the step.
    """
    values = pricing.constants.values
    return values.get("shared", 0.0) + values.get("taken", 0.0) * (
        split.tp * split.cp * np.where(np.asarray(split.zero) >= 2, split.shard, 1)
    )


def leaves_node(split: StepShape, pricing: Pricing) -> Num:
    """Whether ZeRO's shard groups span nodes: transfers over a network need no core."""
    return (np.asarray(split.shard) - 1) * split.tp >= pricing.collectives.per_node
