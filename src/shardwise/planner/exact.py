"""Bytes of single layouts as `estimate` has them.

A search compares arrays of candidates with memory, in closed form; of a pipeline these bytes may be some percent off.
The few layouts that an answer names are followed action by action.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Mesh, Workload, unit_plan
from shardwise.layout.units import usual_backend
from shardwise.model import ModelConfig
from shardwise.planner.fitting import CLASSES, CandidateMemory, Memory, places
from shardwise.planner.pricing import Priced, frame_of
from shardwise.planner.space import LayoutColumns
from shardwise.predict.memory.step import predict_bytes
from shardwise.report.step_report import Bytes

LOW = 1.03
"""A rank's bytes over those of the closed form, at most, with two micro-batches and more for each rank and stages with
as many blocks in each (docs/planner.md)."""

LOW_OTHERWISE = 1.2
"""With fewer micro-batches, or other stages."""

HIGH = 1.25
"""The closed form's bytes over a rank's, at most."""

LEAST = {"1f1b": 0.98, "gpipe": 0.99, "zb-h1": 0.98, "interleaved": 0.92}
"""Schedule -> a rank's bytes over those of the closed form, at least, with two micro-batches and more for each rank;
`LEAST_OTHERWISE` with fewer, or where the embedding and the head are stages of their own."""

LEAST_OF_MANY = 0.97
"""The same of interleaved with 6 chunks a rank and more."""

LEAST_OTHERWISE = 0.89


class Exact:
    """Bytes of layouts of one model and workload on a cluster's fullest device; each layout is followed once."""

    def __init__(self, model: ModelConfig, workload: Workload, cluster: Cluster) -> None:
        self.model, self.workload, self.backend = model, workload, usual_backend(cluster)
        self.known = model.why_not_runnable() is None
        self._memory = cache(lambda attention: Memory(model, workload, attention))
        self._found: dict[Layout, tuple[CandidateMemory, int]] = {}
        self._over: dict[Layout, tuple[CandidateMemory, int]] = {}

    def of(self, layout: Layout, usable: float = float("inf")) -> tuple[CandidateMemory, int]:
        """(bytes, the pipeline's rank that holds them) of the fullest device; of the first rank that needs more than
        `usable`, where one does. In closed form for models that `estimate` does not support."""
        if layout in self._over and self._over[layout][0].total > usable:
            return self._over[layout]
        if layout not in self._found:
            found = self._followed(layout, usable)
            (self._over if found[0].total > usable else self._found)[layout] = found
            return found
        return self._found[layout]

    def least(self, frame: LayoutColumns) -> Any:
        """A candidate's bytes over those of the closed form, at least: an array of rows x 1 x orders, or a number."""
        if frame.pp == 1 or not self.known:
            return 1.0
        if frame.bare:
            return LEAST_OTHERWISE
        of = [LEAST_OF_MANY if order.virtual >= 6 else LEAST[order.schedule] for order in frame.orders]
        usual = np.array(frame.counts)[:, None, None] >= 2 * frame.pp
        return np.where(usual, np.array(of), LEAST_OTHERWISE)

    def priced(self, one: Priced) -> Priced:
        """A priced candidate with these bytes."""
        held, place = self.of(one.layout)
        return replace(one, held=held, place=place)

    def _followed(self, layout: Layout, usable: float) -> tuple[CandidateMemory, int]:
        frame = frame_of(self.model, layout, self.workload)
        closed = [CandidateMemory(*(float(of.flat[0]) if hasattr(of, "flat") else float(of) for of in end))
                  for end in self._memory(layout.attention).ends(frame)]  # fmt: skip
        ranks = sorted(zip(closed, places(self.model, layout.pp), strict=True), key=lambda rank: -rank[0].total)
        if not self.known or (layout.pp == 1 and self.backend == "nccl"):
            return ranks[0]
        usual = frame.counts[0] >= 2 * layout.pp and not frame.bare
        low = LOW if usual else LOW_OTHERWISE
        fullest: tuple[CandidateMemory, int] | None = None
        for held, place in ranks:
            if fullest and (fullest[0].total > usable or held.total * low <= fullest[0].total):
                break
            exact = self._rank(layout, place)
            if fullest is None or exact.total > fullest[0].total:
                fullest = exact, place
        assert fullest
        return fullest

    def _rank(self, layout: Layout, place: int) -> CandidateMemory:
        rank = Mesh.of(layout, self.model).rank(pp=place)
        held: Bytes = predict_bytes(unit_plan(self.model, layout, self.workload, rank=rank, backend=self.backend))
        return CandidateMemory(*(float(getattr(held, name)) for name in (*CLASSES, "total")))
