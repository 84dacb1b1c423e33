"""Which GPUs a model needs: of each kind of the catalog, the smallest number that fits, with speed and price.

All kinds share one table of bytes in training, since memory does not depend on the kind: for each number of devices the
bounds of all candidates are computed once. Candidates are a plain selection of a plan's (`_plain_frames`), so that all
kinds are answered in about the time of one plan. A plan of one of the clusters finds a layout at least as fast.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, log2
from typing import Any

import numpy as np

from shardwise.cluster import Cluster, Device, Link
from shardwise.cluster.catalog import Accelerator, DevicePrice, accelerators, price_of
from shardwise.codec import keyed
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog
from shardwise.model.lora import Lora
from shardwise.model.parameters import count
from shardwise.planner.pricing import Prices
from shardwise.planner.ranking import Block, Candidate, best_of, blocks, bound_of, exact_memory
from shardwise.planner.runnable import space_for
from shardwise.planner.serving import TYPES, Deployment, fastest_deployment, least_bytes, type_name
from shardwise.planner.shortfall import fits
from shardwise.planner.space import LayoutColumns, Space
from shardwise.predict.cluster_links import links_json
from shardwise.predict.memory.capacity import room_of, usable_bytes
from shardwise.predict.memory.step import state_bytes
from shardwise.predict.supported import MOST_DEVICES
from shardwise.predict.time.pricing import Pricing
from shardwise.report.room import DeviceRoom

NODE, RACK = 8, 64
"""Devices of a usual node, and the largest power of two in an NVL72."""
WEIGHT = 2
"""Bytes of a frozen weight."""
TENSOR = ((1, 2, 4, 8), (1, 8))
"""tp of the plain selection: of dense models, of those with experts."""
MICRO = (4, 2)
"""Largest micro-batch, in sequences."""
CONTEXT = (8, 1)
"""Largest cp."""
MOST_EP = 64
"""Largest ep."""


@dataclass(frozen=True)
class DeviceNeed:
    """The smallest cluster of one kind of device that a model fits."""

    cluster: Cluster
    layout: Layout
    """The fastest one that was compared."""
    seconds: float
    """Per training step, or per token of an answer."""
    nbytes: float
    """Bytes of the fullest device."""
    tokens_per_second: float
    price: DevicePrice | None
    weights: str = ""
    """Type of the weights in serving."""

    @property
    def usd_per_hour(self) -> float | None:
        return None if self.price is None else self.price.usd * self.cluster.devices

    @property
    def usd_per_million_tokens(self) -> float | None:
        return self.price and self.price.per_million_tokens(self.cluster.devices, self.tokens_per_second)

    def to_json(self) -> dict[str, Any]:
        seconds = "token_seconds=seconds" if self.weights else "seconds"
        keys = f"devices=cluster.devices layout weights? {seconds} bytes=nbytes tokens_per_second price"
        links = {"cluster": str(self.cluster), "cluster_links": links_json(self.cluster)}
        return links | keyed(self, f"{keys} usd_per_hour usd_per_million_tokens")


def training_needs(
    model: ModelConfig, workload: Workload, engine: str | None = None, price: float | None = None,
    kinds: Collection[str] | None = None,
) -> list[DeviceNeed]:  # fmt: skip
    """For each kind of the catalog the smallest of 1, 2, 4, ... devices on which a training step fits, cheapest tokens
    first.

    price: US dollars per device-hour, in place of the list prices. kinds: names of devices; None for all. Raises
    `UserError` where nothing fits on any kind.
    """
    sizes = _TrainingSizes(model, workload, engine)
    tokens = workload.batch * workload.seq

    def need(cluster: Cluster) -> DeviceNeed | None:
        if (one := sizes.fastest(cluster)) is None:
            return None
        priced = price_of(cluster.device, price)
        return DeviceNeed(cluster, one.place.layout, one.seconds, one.nbytes, tokens / one.seconds, priced)

    return _each_kind(
        need, sizes.least, kinds,
        f"{model.name} with {workload.batch_words} fits no cluster of up to "
        f"{MOST_DEVICES:,} devices of the catalog: take a smaller --seq, or train adapters (--lora rank=16)",
    )  # fmt: skip


def serving_needs(
    model: ModelConfig, workload: Workload, engine: str | None = None, price: float | None = None,
    kinds: Collection[str] | None = None,
) -> list[DeviceNeed]:  # fmt: skip
    """For each kind of the catalog the smallest of 1, 2, 4, ... devices that serve the workload's clients, cheapest
    tokens first. Raises `UserError` where none does, and as `plan_serving` does."""

    def need(cluster: Cluster) -> DeviceNeed | None:
        one: Deployment | None = fastest_deployment(model, cluster, workload, engine)
        if one is None:
            return None
        priced, weights = price_of(cluster.device, price), type_name(one.weights, model)
        return DeviceNeed(cluster, one.layout, one.token, one.held, one.tokens_per_second, priced, weights)

    return _each_kind(
        need, lambda kind: 1, kinds,
        f"{model.name} with {workload.prompt + workload.output:,} tokens a sequence fits no cluster of the catalog",
    )  # fmt: skip


def _each_kind(
    need: Callable[[Cluster], DeviceNeed | None], least: Callable[[Accelerator], int], kinds: Collection[str] | None,
    none: str,
) -> list[DeviceNeed]:  # fmt: skip
    """The smallest cluster of each kind that has a need, in nodes of which the links are known; cheapest tokens
    first, kinds without a price last. least: number of devices to begin with. none: what a `UserError` says where no
    kind has one."""
    needs = []
    for name, kind in accelerators().devices.items():
        if kinds is not None and name not in kinds:
            continue
        most = 1 if kind.intra.bandwidth is None else NODE if kind.inter.bandwidth is None else MOST_DEVICES
        sizes = (1 << k for k in range(most.bit_length()) if least(kind) <= 1 << k <= most)
        found = (need(cluster_of_size(kind, devices)) for devices in sizes)
        if (first := next(filter(None, found), None)) is not None:
            needs.append(first)
    if not needs:
        raise UserError(none)
    return sorted(needs, key=_order)


def _order(need: DeviceNeed) -> tuple[bool, float, int]:
    usd = need.usd_per_million_tokens
    return usd is None, usd or 0.0, need.cluster.devices


def cluster_of_size(kind: Accelerator, devices: int) -> Cluster:
    """So many devices of a kind, in nodes of 8, or racks where NVLink joins 72."""
    node = min(devices, RACK if kind.domain else NODE)
    return Cluster(devices // node, node, kind.device, kind.intra, kind.inter)


class _TrainingSizes:
    def __init__(self, model: ModelConfig, workload: Workload, engine: str | None) -> None:
        self.model, self.workload = model, workload
        some = next(iter(accelerators().devices.values()))
        self.space, _ = space_for(model, cluster_of_size(some, 1), workload, engine, {})
        self.exact = exact_memory(self.space)
        self.bound = bound_of(self.space)
        self.blocks = cache(self._blocks)

    def least(self, kind: Accelerator) -> int:
        """The first power of two whose memory has room for the optimizer's state of all parameters."""
        state = count(self.model) * (WEIGHT if self.model.lora else state_bytes("bf16", self.workload.optimizer))
        return 1 << max(0, ceil(log2(state / usable_bytes(cluster_of_size(kind, 1)))))

    def fastest(self, cluster: Cluster) -> Candidate | None:
        """The fastest plain candidate that fits a cluster, with its exact bytes."""
        usable = room_of(cluster, self.space.engine.name, bool(self.model.experts)).safe
        fitting = [block for block in self.blocks(cluster.devices) if (block.nbytes <= usable).any()]
        if not fitting:
            return None
        frames = [block.frame for block in fitting]
        prices = Prices(self.model, self.workload, self.space.attention, Pricing(cluster), frames)
        priced = [replace(block, engine=self.space.engine).priced(prices) for block in fitting]
        for place in best_of(priced, self.exact, "throughput", 1, usable):
            seconds = next(block.seconds for block in priced if block.frame is place.frame)
            index = place.row, place.sharding, place.order
            return Candidate(float(seconds[index]), self.exact.total(place.layout), place)
        return None

    def _blocks(self, devices: int) -> Sequence[Block]:
        """Bytes of the plain candidates of so many devices of any kind."""
        any_kind = replace(
            self.exact.cluster.without_paths(), nodes=max(1, devices // NODE), devices_per_node=min(devices, NODE)
        )
        features = self.space.engine.features
        recompute = tuple(kind for kind in ("none", "full") if kind in features.recompute)
        plain = replace(features, schedules=(), hybrid=False, copies=False, recompute=recompute)
        space = replace(self.space, cluster=any_kind, engine=replace(self.space.engine, features=plain))
        frames = [frame for frame in _plain_frames(space) if frame.size]
        return [block for _, block in blocks(space, self.exact, None, np.inf, frames=frames, bound=self.bound)]


def _plain_frames(space: Space) -> Iterator[LayoutColumns]:
    """A few of each key: `TENSOR`, `MICRO` and `CONTEXT`; sp where it may be; ep as large as can be up to `MOST_EP`."""
    mixed = bool(space.model.experts)
    widest: dict[int, int] = {}
    for frame in space.frames:
        if frame.ep <= MOST_EP:
            widest[frame.tp] = max(frame.ep, widest.get(frame.tp, 1))
    for frame in space.frames:
        if frame.tp in TENSOR[mixed] and frame.ep == widest.get(frame.tp):
            sp = any(row.sp for row in frame.rows)
            few = (r for r in frame.rows if r.sp == sp and r.micro <= MICRO[mixed] and r.cp <= CONTEXT[mixed])
            yield replace(frame, rows=tuple(few))


LENGTH = 2048
"""Tokens of the one sequence."""
ADAPTERS = "rank=16"
KINDS = {"bfloat16": "generate bf16", "int8": "int8", "int4": "int4", "lora": "train LoRA r16", "full": "train"}
"""Ways to use a model -> words."""
BYTES = {"lora": 2, "full": 14}
"""Bytes per parameter that training needs at least."""
LEANEST = {"recompute": "full", "micro": 1}


@dataclass(frozen=True)
class ModelFit:
    """One model, and the bytes that each of `KINDS` needs where it fits; adapters for experts there are none."""

    name: str
    parameters: int
    held: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "parameters": self.parameters,
            "bytes": {kind: self.held.get(kind) for kind in KINDS},
        }


def models_that_fit(memory: int) -> list[ModelFit]:
    """The models that fit in some way, largest first. Raises `UserError` where none does."""
    unknown = Link(None, None)
    cluster = Cluster(1, 1, Device("device", "cuda", memory, None), unknown, unknown)
    room = room_of(cluster)
    sizes = ((name, model, count(model)) for name, model in catalog().items())
    rows = [
        ModelFit(name, params, _held(model, cluster, room)) for name, model, params in sizes if params < room.usable
    ]
    fitting = [row for row in rows if row.held]
    if not fitting:
        raise UserError("no model of the catalog fits so little memory; the smallest are tiny ones of `list models`")
    return sorted(fitting, key=lambda row: (-row.parameters, row.name))


def _held(model: ModelConfig, cluster: Cluster, room: DeviceRoom) -> dict[str, float]:
    length = min(LENGTH, model.max_positions)
    held = {kind: least_bytes(model, length, kind) for kind in KINDS if kind in TYPES and not model.why_not_runnable()}
    step = Workload(length, 1)
    ways = {"full": model} | ({} if model.experts else {"lora": model.replace(lora=Lora.parse(ADAPTERS))})
    for kind, trained in ways.items():
        if count(model) * BYTES[kind] > room.safe:
            continue
        if found := fits(space_for(trained, cluster, step, None, LEANEST)[0], room.safe):
            held[kind] = found.nbytes
    return {kind: nbytes for kind, nbytes in held.items() if nbytes <= room.usable}
