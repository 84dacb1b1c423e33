"""Bytes of single layouts, event by event: the numbers of `estimate`.

A search compares columns of candidates with a lower bound (`bounds.py`), and follows the rest event by event.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil, inf
from typing import NamedTuple

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, unit_plan
from shardwise.layout.units import Backend, usual_backend
from shardwise.model.parameters import Model
from shardwise.planner.bounds import places
from shardwise.predict.memory.engine_bytes import as_bytes, counts_engine, engine_ranks
from shardwise.predict.memory.engine_rows import engine_memory
from shardwise.predict.memory.engine_settings import USUAL, EngineSettings
from shardwise.predict.memory.step import predict_bytes
from shardwise.predict.node_bytes import NodeBytes, node_bytes
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
        self.node = cache(self._node)
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

    def _node(self, layout: Layout) -> NodeBytes:
        """Bytes off the devices of the fullest node."""
        return node_bytes(self.model, layout, self.workload, self.cluster)

    def _followed(self, layout: Layout, usable: float) -> FullestRank:
        fullest: FullestRank | None = None
        if counts_engine(self.engine, self.model, layout):
            return self._under_engine(layout)
        for place in places(self.model, layout.pp, layout.schedule):
            rank = predict_bytes(rank_plan(self.model, layout, self.workload, place, self.backend))
            if fullest is None or rank.total > fullest.bytes.total:
                fullest = FullestRank(rank, place)
            if fullest.bytes.total > usable:
                break
        assert fullest
        return fullest

    def _under_engine(self, layout: Layout) -> FullestRank:
        """The fullest rank under the engine's software."""
        memory = engine_memory(self.engine)
        assert memory
        plan = rank_plan(self.model, layout, self.workload, 0, self.backend)
        at = list(range(layout.pp)) if layout.stages else places(self.model, layout.pp, layout.schedule)
        ranks = engine_ranks(memory, plan, at, self.settings)
        place, rank = max(zip(at, ranks, strict=True), key=lambda each: each[1].peak)
        return FullestRank(as_bytes(rank), place)


def rank_plan(model: Model, layout: Layout, workload: Workload, place: int, backend: Backend) -> UnitPlan:
    """The plan of a rank at one place of the pipeline."""
    return unit_plan(model, layout, workload, rank=Mesh.of(layout, model).rank(pp=place), backend=backend)
