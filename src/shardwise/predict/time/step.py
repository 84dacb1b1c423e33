"""The time of one training step, in closed form.

`training_step` takes numbers or numpy arrays for every degree and count of a `Split` (they broadcast: one call prices
many candidates); the switches (`sp`, `recompute`, `zero`, ...) are one for a call. Independent of the split, and worth
keeping between calls: a `Kernels` for a device and a `Collectives` for a cluster (`Pricing` holds both). The time of
a block depends on a few numbers of a split only (`BLOCK_DEPENDS_ON`): over many candidates it is computed once for each
combination of them, and what remains for each candidate is a few dozen operations on arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.parameters import count_parts
from shardwise.predict.time.block import Shape, Tally, block, embedding, head, padded_vocab
from shardwise.predict.time.constants import Constants, constants
from shardwise.predict.time.kernels import WIDTH, Kernels
from shardwise.predict.time.network import Collectives
from shardwise.predict.time.profiles import Engine

Num = Any
Parts = dict[str, Num]


@dataclass(frozen=True)
class Split:
    """The numbers of a layout and a workload that time depends on. seq: tokens of a sequence; micro_batches: of each
    data-parallel rank; shard: ranks that ZeRO shards over; dtype: of the matrix products."""

    seq: int
    micro: Num = 1
    micro_batches: Num = 1
    tp: Num = 1
    pp: Num = 1
    dp: Num = 1
    cp: Num = 1
    ep: Num = 1
    virtual: Num = 1
    shard: Num = 1
    zero: int = 0
    sp: bool = False
    recompute: str = "none"
    dtype: str = "bfloat16"

    @classmethod
    def of(cls, layout: Layout, workload: Workload, dtype: str | None = None) -> Split:
        """The split that a layout makes of a training workload. Raises `UserError` where the batch does not divide."""
        return cls(
            seq=workload.seq,
            micro=layout.micro,
            micro_batches=workload.micro_batches(layout),
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            cp=layout.cp,
            ep=layout.ep,
            virtual=layout.virtual,
            shard=layout.shard_ranks,
            zero=layout.stage,
            sp=layout.sp,
            recompute=layout.recompute,
            dtype=dtype or layout.dtype,
        )


BLOCK_DEPENDS_ON = ("micro", "tp", "cp", "ep", "shard")
"""The numbers of a split that the time of one block, of the embedding and of the head depends on."""

HOST_MEETS = 4
"""How sharply the longer of host and device decides: each waits for the other at times, by a fifth where both take as
long. Fitted on eager runs near that point (docs/prediction.md)."""

COLLECTIVE_LAUNCHES = 1
"""Launches that the host's part of one collective counts for."""


class Pricing:
    """What is worth keeping between calls: the kernels of a device and the collectives of a cluster."""

    def __init__(self, cluster: Cluster, known: Constants | None = None) -> None:
        self.cluster = cluster
        self.constants = known or constants(cluster.device)
        self.kernels = Kernels(self.constants)
        self.collectives = Collectives(cluster, self.constants)


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, and where they go: `parts` adds up to `seconds`.

    matmul, attention, memory: of the busiest stage, all micro-batches, recomputation included. host: waiting for
    launches. tensor, experts, pipeline, data: exposed collectives and sends. bubble: idle in the pipeline.
    optimizer: the update.
    """

    seconds: Num
    parts: Mapping[str, Num]


def training_step(model: ModelConfig, split: Split, engine: Engine, pricing: Pricing) -> StepSeconds:
    """Seconds of one steady training step. Sources: docs/prediction.md names the formulas of each part."""
    blocks = _stages(model, split, engine, pricing)
    micro, passes = blocks.busiest, split.micro_batches
    parts = {name: seconds * passes for name, seconds in micro.items()}
    parts["bubble"] = blocks.fill
    parts["pipeline"] = _hops(model, split, engine, pricing)
    window = sum(micro[name] for name in ("matmul", "attention", "memory", "host", "tensor")) * 2 / 3
    parts["data"] = _data(model, split, engine, pricing, window)
    parts["optimizer"] = _optimizer(model, split, engine, pricing)
    return StepSeconds(sum(parts.values()), parts)


@dataclass(frozen=True)
class _Stages:
    busiest: Parts
    fill: Num


def _stages(model: ModelConfig, split: Split, engine: Engine, pricing: Pricing) -> _Stages:
    """One micro-batch on the stage that takes longest, and the seconds in which it has nothing to do."""
    few, expand = _distinct(split)
    per_block, first, last = (expand(parts) for parts in _pieces(model, few, engine, pricing))
    chunks = split.pp * split.virtual
    even = np.asarray(model.layers) % chunks == 0
    held = np.where(even, model.layers / split.pp, np.ceil((model.layers + 2) / chunks) * split.virtual)
    # Where layers do not divide, embedding and head take the place of a layer each (Megatron-Core,
    # --account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split).
    with_head = np.where(even, held, held - 1)
    one, loss = _total(per_block, "launches"), _total(last, "launches")
    tail = (with_head * one + loss >= held * one) | (np.asarray(split.pp) == 1)
    alone = np.asarray(split.pp) == 1
    busiest = {
        name: np.where(tail, with_head, held) * per_block[name]
        + np.where(tail, last.get(name, 0.0), 0.0)
        + np.where(alone, first.get(name, 0.0), 0.0)
        for name in per_block
    }
    busiest["host"] = _host(model, busiest.pop("launches"), split, engine, pricing, _total(busiest))
    total = model.layers * one + loss + _total(first, "launches")
    ratio = _total(busiest) / (_total(busiest) - busiest["host"])
    fill = np.where(alone, 0.0, np.maximum(total * ratio - _total(busiest), 0.0) / split.virtual)
    return _Stages(busiest, fill)


def _distinct(split: Split) -> tuple[Split, Callable[[Parts], Parts]]:
    """The split with each combination of what a block's time depends on once, and how to spread its parts again.

    Candidates by the hundred thousand have a few dozen such combinations.
    """
    arrays = np.broadcast_arrays(*(getattr(split, name) for name in BLOCK_DEPENDS_ON))
    if arrays[0].size < 64:
        return split, lambda parts: parts
    key = np.zeros(arrays[0].shape, dtype=np.int64)
    for array in arrays:
        key = key * (int(array.max()) + 1) + array
    _, where, inverse = np.unique(key, return_index=True, return_inverse=True)
    inverse = inverse.reshape(key.shape)
    numbers: dict[str, Any] = {name: array.ravel()[where] for name, array in zip(BLOCK_DEPENDS_ON, arrays, strict=True)}

    def expand(parts: Parts) -> Parts:
        return {name: np.broadcast_to(part, where.shape)[inverse] for name, part in parts.items()}

    return replace(split, **numbers), expand


def _pieces(model: ModelConfig, split: Split, engine: Engine, pricing: Pricing) -> tuple[Parts, Parts, Parts]:
    """Seconds by kind, and launches, of one micro-batch: of a block (the model's mean), the embedding, the head."""
    shape = Shape(
        micro=split.micro,
        seq=split.seq / split.cp,
        tp=split.tp,
        stream=split.micro * split.seq / split.cp / (split.tp if split.sp else 1),
        keys=split.seq,
        ep=split.ep,
        dtype=split.dtype,
    )
    kinds = [(False, model.layers)]
    if model.experts:
        kinds = [(False, model.experts.dense_layers), (True, model.layers - model.experts.dense_layers)]
    per_block: Parts = {}
    for experts, layers in kinds:
        if layers:
            one = _block_seconds(model, shape, split, engine, pricing, experts)
            per_block = {name: per_block.get(name, 0.0) + one[name] * (layers / model.layers) for name in one}
    first = _edge(embedding(model, shape, engine, pricing.kernels))
    last = _edge(head(model, shape, engine, pricing.kernels))
    return per_block, first, last


def _total(parts: Parts, *but: str) -> Num:
    return sum(seconds for name, seconds in parts.items() if name not in but)


def _block_seconds(model: ModelConfig, shape: Shape, split: Split, engine: Engine, pricing: Pricing,
                   experts: bool) -> Parts:  # fmt: skip
    """Forward, backward and recomputation of one block for one micro-batch, with what it waits for."""
    tally = block(model, shape, engine, pricing.kernels, experts)
    again = {"none": {}, "selective": tally.selective, "full": tally.forward, "input": tally.forward}[split.recompute]
    parts = {kind: tally.forward[kind] + tally.backward[kind] + again.get(kind, 0.0) for kind in tally.forward}
    parts["tensor"] = _tensor(model, shape, split, engine, pricing)
    parts["experts"] = _dispatch(model, shape, split, pricing) if experts else 0.0 * parts["tensor"]
    repeated = {"none": 0.0, "selective": tally.launches["selective"]}.get(split.recompute, tally.launches["forward"])
    busy = _total(parts)
    parts["tensor"] = parts["tensor"] + _sharded(model, split, engine, pricing, busy)
    collectives = np.where(np.asarray(split.tp) > 1, 6 if split.recompute in ("full", "input") else 4, 0)
    parts["launches"] = (
        tally.launches["forward"] + tally.launches["backward"] + repeated + COLLECTIVE_LAUNCHES * collectives
    )
    return parts


def _edge(tally: Tally) -> Parts:
    parts = {kind: tally.forward[kind] + tally.backward[kind] for kind in tally.forward}
    return parts | {"launches": tally.launches["forward"] + tally.launches["backward"]}


def _host(model: ModelConfig, launches: Num, split: Split, engine: Engine, pricing: Pricing, busy: Num) -> Num:
    """Seconds for which the device waits for the host in a micro-batch: launches that take longer than what they
    start. A stage of a pipeline receives and sends both ways."""
    if engine.graphs and (engine.experts_captured or not model.experts):
        return 0.0 * busy
    hops = np.where(np.asarray(split.pp) > 1, engine.pipeline_launches, 0)
    host = (launches + hops) * pricing.constants.value("launch_s")
    longer = np.maximum(host, busy)
    return longer * ((host / longer) ** HOST_MEETS + (busy / longer) ** HOST_MEETS) ** (1 / HOST_MEETS) - busy


def _tensor(model: ModelConfig, shape: Shape, split: Split, engine: Engine, pricing: Pricing) -> Num:
    """Exposed collectives of a block over tp and cp: two sums forward and two backward (Shoeybi et al. 2019), each a
    gather and a scatter under sp, which gathers twice more in backward (Korthikanti et al. 2022)."""
    price = pricing.collectives.seconds
    full = shape.tokens * model.hidden * 2.0
    hidden = pricing.constants.value("tensor_hidden") if engine.tensor_overlap else 0.0
    if split.sp:
        gather = price("all_gather_into", full, split.tp)
        scatter = price("reduce_scatter", full, split.tp)
        forward, again = 2 * (gather + scatter), 2 * gather
        back = 2 * (gather + scatter) + again
        exposed_back = 2 * gather + (back - 2 * gather) * (1 - hidden)
    else:
        forward = back = 2 * price("all_reduce", full, split.tp)
        exposed_back = back * (1 - hidden)
    runs = 2 if split.recompute in ("full", "input") else 1
    exchange = 0.0
    if np.any(np.asarray(split.cp) > 1):
        kv = 2 * shape.micro * split.seq * np.maximum(model.kv_width / split.tp, model.head_dim) * 2.0
        ring = price("all_gather_into", kv, split.cp, split.tp)
        # The ring's messages run beside its attention; what is left is as a hidden collective's.
        exchange = 3 * ring * (1 - pricing.constants.value("tensor_hidden"))
    return forward * runs + exposed_back + exchange


def _dispatch(model: ModelConfig, shape: Shape, split: Split, pricing: Pricing) -> Num:
    """Tokens to their experts and back, forward and backward: four all-to-alls of the routed tokens."""
    assert model.experts
    width = WIDTH[split.dtype] if split.dtype == "float8_e4m3fn" else 2.0
    routed = shape.stream * np.minimum(model.experts.active, split.ep) * model.hidden
    there = pricing.collectives.seconds("all_to_all", routed * width, split.ep)
    back = pricing.collectives.seconds("all_to_all", routed * 2.0, split.ep)
    return 2 * (there + back)


def _hops(model: ModelConfig, split: Split, engine: Engine, pricing: Pricing) -> Num:
    """Sends between stages: one forward and one backward for each micro-batch and chunk, and those of the fill."""
    pieces = split.tp if (engine.scatter_hops or split.sp) else 1
    nbytes = split.micro * split.seq / split.cp * model.hidden * 2.0 / pieces
    hop = pricing.collectives.hop(nbytes, split.tp * split.cp * split.dp)
    if engine.scatter_hops and not split.sp:
        hop = hop + pricing.collectives.seconds("all_gather_into", nbytes * split.tp, split.tp)
    steady = 0.0 if engine.pipeline_overlap else split.micro_batches * split.virtual
    return np.where(np.asarray(split.pp) > 1, 2 * hop * (steady + split.pp - 1), 0.0)


def _held(model: ModelConfig, split: Split, engine: Engine) -> tuple[Num, Num]:
    """Parameters of the busiest rank: (all but the experts', the experts')."""
    routed = 0.0
    if model.experts:
        layers = model.layers - model.experts.dense_layers
        branches = 3 if model.gated else 2
        routed = layers * model.experts.count * branches * model.hidden * model.experts.ffn
    blocks = (count_parts(model)[1] - routed) / (split.pp * split.tp)
    table = padded_vocab(model, engine, split.tp) * model.hidden / split.tp
    tables = np.where(np.asarray(split.pp) == 1, 1 if model.tied else 2, 1)
    return blocks + table * tables, routed / (split.pp * split.ep) + 0.0 * blocks


def _data(model: ModelConfig, split: Split, engine: Engine, pricing: Pricing, window: Num) -> Num:
    """Exposed seconds of gradients' reduction and parameters' gathering over the data ranks; stage 3 is `_sharded`."""
    if split.zero == 3:
        return 0.0 * window
    dense, routed = _held(model, split, engine)
    data = split.dp * split.cp
    price = pricing.collectives.seconds
    spread = np.maximum(data * split.tp / split.ep, 1) if model.experts else data
    width = 2.0
    if split.zero:
        reduce = price("reduce_scatter", dense * engine.grad_bytes, data, split.tp)
        reduce = reduce + price("reduce_scatter", routed * engine.grad_bytes, spread, split.ep)
        gather = price("all_gather_into", dense * width, data, split.tp)
        gather = gather + price("all_gather_into", routed * width, spread, split.ep)
    else:
        reduce = price("all_reduce", dense * engine.grad_bytes, data, split.tp)
        reduce = reduce + price("all_reduce", routed * engine.grad_bytes, spread, split.ep)
        gather = 0.0 * reduce
    first = 1 / np.maximum(model.layers / split.pp, 1)
    contention = pricing.constants.value("contention")
    if engine.grad_overlap:
        reduce = np.maximum(reduce * first, reduce - window) + contention * np.minimum(reduce, window)
    if engine.gather_overlap:
        gather = np.maximum(gather * first, gather - window / 2) + contention * np.minimum(gather, window / 2)
    tied = 0.0
    if model.tied:
        table = padded_vocab(model, engine, split.tp) * model.hidden / split.tp
        ends = np.where(np.asarray(split.pp) > 1, 2, 1)
        tied = price("all_reduce", table * engine.grad_bytes, ends, split.tp * data * np.maximum(split.pp - 1, 1))
    return reduce + gather + tied


def _sharded(model: ModelConfig, split: Split, engine: Engine, pricing: Pricing, busy: Num) -> Num:
    """ZeRO-3, one block of one micro-batch: two gathers and a reduce-scatter beside `busy` seconds of computation.

    The first unit's gather and the last one's scatter have nothing beside them: an n-th of the blocks each.
    """
    if split.zero != 3:
        return 0.0 * busy
    numel = count_parts(model)[1] / model.layers / split.tp
    gather = pricing.collectives.seconds("all_gather_into", numel * 2.0, split.shard, split.tp)
    reduce = pricing.collectives.seconds("reduce_scatter", numel * engine.grad_bytes, split.shard, split.tp)
    traffic = 2 * gather + reduce
    exposed = np.maximum(traffic - busy, 0.0) + (gather + reduce) / model.layers
    return exposed + pricing.constants.value("contention") * np.minimum(traffic, busy)


def _optimizer(model: ModelConfig, split: Split, engine: Engine, pricing: Pricing) -> Num:
    dense, routed = _held(model, split, engine)
    numel = (dense + routed) / (split.shard if split.zero else 1)
    return pricing.kernels.pass_over(numel * engine.optimizer_bytes) + pricing.constants.value("step_s")
