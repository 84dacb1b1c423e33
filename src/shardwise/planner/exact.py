"""Bytes of single layouts, event by event: the numbers of `estimate`.

A search compares columns of candidates with a lower bound (`bounds.py`), and follows the rest event by event.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, unit_plan
from shardwise.layout.units import Backend, usual_backend
from shardwise.model import ModelConfig
from shardwise.planner.bounds import places
from shardwise.predict.memory.step import predict_bytes
from shardwise.report.step_report import Bytes


class FullestRank(NamedTuple):
    """The rank of a layout that needs most memory."""

    bytes: Bytes
    place: int
    """Its place in the pipeline."""


class ExactMemory:
    """Memory of layouts of one model and workload on a cluster; each layout is followed once."""

    def __init__(self, model: ModelConfig, workload: Workload, cluster: Cluster) -> None:
        self.model, self.workload = model, workload
        self.backend = usual_backend(cluster)
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

    def total(self, layout: Layout, usable: float = float("inf")) -> int:
        """Bytes of the fullest rank, as `of` names it."""
        return self.of(layout, usable).bytes.total

    def _followed(self, layout: Layout, usable: float) -> FullestRank:
        fullest: FullestRank | None = None
        for place in places(self.model, layout.pp, layout.schedule):
            rank = predict_bytes(rank_plan(self.model, layout, self.workload, place, self.backend))
            if fullest is None or rank.total > fullest.bytes.total:
                fullest = FullestRank(rank, place)
            if fullest.bytes.total > usable:
                break
        assert fullest
        return fullest


def rank_plan(model: ModelConfig, layout: Layout, workload: Workload, place: int, backend: Backend) -> UnitPlan:
    """The plan of a rank at one place of the pipeline."""
    return unit_plan(model, layout, workload, rank=Mesh.of(layout, model).rank(pp=place), backend=backend)
