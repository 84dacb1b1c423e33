"""Bytes of single layouts, event by event: the numbers of `estimate`.

A search compares columns of candidates with a lower bound (`bounds.py`), and follows the rest event by event.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np

from shardwise.arrays import Num
from shardwise.cluster import Cluster
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, unit_plan
from shardwise.layout.pipeline import stages
from shardwise.layout.unit import Backend
from shardwise.layout.units import usual_backend
from shardwise.model import ModelConfig
from shardwise.model.parameters import Model
from shardwise.planner.bounds import all_places, places
from shardwise.planner.space import BatchChoice, LayoutColumns
from shardwise.predict.memory.engine_bytes import (
    EngineRank,
    MicroBatchNumbers,
    RankNumbers,
    as_bytes,
    counts_engine,
    engine_ranks,
    in_all,
    in_flight,
    micro_batch,
    rank_numbers,
    remade_in_all,
)
from shardwise.predict.memory.engine_rows import EngineMemory, engine_memory
from shardwise.predict.memory.engine_settings import USUAL, EngineSettings
from shardwise.predict.memory.step import predict_bytes
from shardwise.predict.node_bytes import node_bytes
from shardwise.report.step_report import Bytes

Refuses = Callable[[Layout], str]
"""Why a layout cannot be chosen, whatever it needs; empty where it can."""


class FullestRank(NamedTuple):
    """The rank of a layout that needs most memory."""

    bytes: Bytes
    place: int
    """Its place in the pipeline."""


class ExactMemory:
    """Memory of layouts of one model and workload on a cluster; each layout is followed once.

    engine: the software whose memory it is, with its settings; "" for this project's runtime.
    """

    def __init__(
        self, model: Model, workload: Workload, cluster: Cluster, refuses: Refuses | None = None, engine: str = "",
        settings: EngineSettings = USUAL,
    ) -> None:  # fmt: skip
        self.model, self.workload, self.cluster, self.refuses = model, workload, cluster, refuses
        self.engine, self.settings = engine, settings
        self.backend = usual_backend(cluster)
        self.node = cache(lambda layout: node_bytes(model, layout, workload, cluster))
        self._fullest: dict[Layout, FullestRank] = {}
        self._over: dict[Layout, FullestRank] = {}

    def of(self, layout: Layout, usable: float = float("inf")) -> FullestRank:
        """The fullest rank; the first one that needs more than `usable` bytes, where one does."""
        if (over := self._over.get(layout)) and over.bytes.total > usable:
            return over
        if layout not in self._fullest:
            fullest = self._followed(layout, usable)
            (self._over if fullest.bytes.total > usable else self._fullest)[layout] = fullest
            return fullest
        return self._fullest[layout]

    def total(self, layout: Layout, usable: float = float("inf")) -> float:
        """Bytes of the fullest rank, as `of` names it. On a CPU with its part of what is off the device, since all is
        in one memory; infinite where a node's host has too little memory, and for layouts that are refused."""
        if self.refuses and self.refuses(layout):
            return inf
        held, host = self.of(layout, usable).bytes.total, self.cluster.host.memory_bytes
        if layout.offload_home == "none" or held > usable:
            return held
        if self.cluster.device.kind == "cpu":
            return held + ceil(self.node(layout).host / self.cluster.devices_per_node)
        return held if host is None or self.node(layout).host <= host else inf

    def _followed(self, layout: Layout, usable: float) -> FullestRank:
        fullest: FullestRank | None = None
        if counts_engine(self.engine, self.model, layout):
            return self._under_engine(layout)
        for place in self._places(layout):
            rank = predict_bytes(rank_plan(self.model, layout, self.workload, place, self.backend))
            if fullest is None or rank.total > fullest.bytes.total:
                fullest = FullestRank(rank, place)
            if fullest.bytes.total > usable:
                break
        assert fullest
        return fullest

    def _places(self, layout: Layout) -> list[int]:
        if layout.pp == 1:
            return [0]
        return places(self.model, stages(self.model, layout).layers, layout.pp, layout.schedule)

    def _under_engine(self, layout: Layout) -> FullestRank:
        memory = engine_memory(self.engine)
        assert memory
        plan = rank_plan(self.model, layout, self.workload, 0, self.backend)
        at = self._places(layout)
        ranks = engine_ranks(memory, plan, at, self.settings)
        place, rank = max(zip(at, ranks, strict=True), key=lambda each: each[1].peak)
        return FullestRank(as_bytes(rank), place)


def rank_plan(model: Model, layout: Layout, workload: Workload, place: int, backend: Backend) -> UnitPlan:
    return unit_plan(model, layout, workload, rank=Mesh.of(layout, model).rank(pp=place), backend=backend)


class EngineBound:
    """Bytes of candidates of one model and workload under one engine."""

    def __init__(
        self, model: ModelConfig, workload: Workload, attention: str, backend: Backend, memory: EngineMemory,
        settings: EngineSettings,
    ) -> None:  # fmt: skip
        self.model, self.workload, self.attention, self.backend, self.memory = (
            model, workload, attention, backend, memory
        )  # fmt: skip
        self.settings = settings
        experts = model.experts and replace(model.experts, dense_layers=0)
        self._one_block = model.replace(layers=1, experts=experts)
        self._rows: dict[Any, MicroBatchNumbers] = {}

    def add(self, frames: Iterable[LayoutColumns]) -> None:
        """No-op: each row is counted once anyway."""

    def total(self, frame: LayoutColumns) -> Num:
        """Bytes of each candidate's fullest rank, an array of the frame's shape."""
        columns = zip(*(self._row(frame.tp, frame.ep, row) for row in frame.rows), strict=True)
        micro = MicroBatchNumbers(*(np.array(column)[:, None, None] for column in columns))
        most = np.zeros(frame.shape)
        for place in all_places(self.model, frame):
            for numbers, orders in self._sorts(frame, place):
                peak = self._rank(frame, place, numbers, orders, micro).total().peak
                most[:, :, orders] = np.maximum(most[:, :, orders], peak)
        return np.ceil(most)

    def _sorts(self, frame: LayoutColumns, place: int) -> Iterator[tuple[list[RankNumbers], list[int]]]:
        sorts: dict[Any, list[int]] = {}
        numbers = []
        for index, order in enumerate(frame.orders):
            numbers.append(rank_numbers(self.model, frame.tp, frame.ep, frame.stages(order), frame.pp, place))
            sorts.setdefault((numbers[-1].blocks, numbers[-1].experts), []).append(index)
        yield from (([numbers[index] for index in of], of) for of in sorts.values())

    def _rank(
        self, frame: LayoutColumns, place: int, numbers: list[RankNumbers], orders: list[int], micro: MicroBatchNumbers
    ) -> EngineRank:
        # Of each order, one row a chunk: micro-batches in flight at each count.
        flying = [
            np.array([in_flight(order.schedule, frame.pp, count, order.virtual, place) for count in frame.counts]).T
            for order in (frame.orders[index] for index in orders)
        ]

        def table(of: Any) -> Num:
            return np.stack([of(*each) for each in zip(numbers, flying, strict=True)], axis=1)[:, None, :]

        layers = self.settings.layers
        dense, routed = (table(lambda n, f, of=of: remade_in_all(n, f, layers)[of]) if layers else 0 for of in (0, 1))
        stage = frame.columns["zero"]
        shard = np.where(stage > 0, frame.columns["shard"], 1)
        replicas = np.where(stage > 0, max(1, frame.expert_replicas), 1)
        return EngineRank(
            self.memory, numbers[0], micro, stage, shard, replicas, table(lambda n, f: in_all(n.dense, f)),
            table(lambda n, f: in_all(n.routed, f)), table(lambda n, f: f[0]), frame.pp, self.workload.optimizer,
            narrow=self.settings.narrow, remade=(dense, routed), maximum=np.maximum,
        )  # fmt: skip

    def _row(self, tp: int, ep: int, row: BatchChoice) -> MicroBatchNumbers:
        """Bytes of a micro-batch, which are those of one sequence times its sequences."""
        one = row._replace(micro=1)
        key = tp, ep, one
        if key not in self._rows:
            ranks = ep if self.model.experts else 1
            layout = Layout(tp=tp, ep=ranks, dp=ranks, attention=self.attention, **one._asdict())
            plan = unit_plan(self._one_block, layout, replace(self.workload, batch=ranks), backend=self.backend)
            self._rows[key] = micro_batch(self.memory, plan, self.settings)
        return MicroBatchNumbers(*(row.micro * nbytes for nbytes in self._rows[key]))
