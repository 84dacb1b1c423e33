"""Bytes of many candidates at once under another engine's software: the numbers of `estimate`, not a bound of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.units import Backend
from shardwise.model import ModelConfig
from shardwise.planner.bounds import places
from shardwise.planner.rank_bound import Num
from shardwise.planner.space import BatchChoice, LayoutColumns
from shardwise.predict.memory.engine_bytes import (
    EngineRank,
    MicroBatchNumbers,
    RankNumbers,
    in_all,
    in_flight,
    micro_batch,
    rank_numbers,
    remade_in_all,
)
from shardwise.predict.memory.engine_rows import EngineMemory
from shardwise.predict.memory.engine_settings import EngineSettings
from shardwise.schedule.pipeline.stages import StageLayers


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
        for place in places(self.model, frame.pp, "1f1b"):
            for numbers, orders in self._sorts(frame, place):
                peak = self._rank(frame, place, numbers, orders, micro).total().peak
                most[:, :, orders] = np.maximum(most[:, :, orders], peak)
        return np.ceil(most)

    def _sorts(self, frame: LayoutColumns, place: int) -> Iterator[tuple[list[RankNumbers], list[int]]]:
        """Orders under which a rank has equal parameters, with its chunks under each."""
        sorts: dict[Any, list[int]] = {}
        numbers = []
        for index, order in enumerate(frame.orders):
            layers = StageLayers.even(self.model.layers, frame.pp * order.virtual).layers
            numbers.append(rank_numbers(self.model, frame.tp, frame.ep, layers, frame.pp, place))
            sorts.setdefault((numbers[-1].blocks, numbers[-1].experts), []).append(index)
        yield from (([numbers[index] for index in of], of) for of in sorts.values())

    def _rank(
        self, frame: LayoutColumns, place: int, numbers: list[RankNumbers], orders: list[int], micro: MicroBatchNumbers
    ) -> EngineRank:
        """The rank at one place under orders that give it equal parameters."""
        flying = [
            [in_flight(frame.orders[order].schedule, frame.pp, count, frame.orders[order].virtual, place)
             for order in orders]
            for count in frame.counts
        ]  # fmt: skip

        def table(of: Any) -> Num:
            return np.array([[of(*each) for each in zip(numbers, row, strict=True)] for row in flying])[:, None, :]

        layers = self.settings.layers
        again = tuple(table(lambda n, f, of=of: remade_in_all(n, f, layers)[of]) for of in (0, 1)) if layers else (0, 0)
        stage = frame.columns["zero"]
        shard = np.where(stage > 0, frame.columns["shard"], 1)
        replicas = np.where(stage > 0, max(1, frame.expert_replicas), 1)
        return EngineRank(
            self.memory, numbers[0], micro, stage, shard, replicas, table(lambda n, f: in_all(n.dense, f)),
            table(lambda n, f: in_all(n.routed, f)), table(lambda n, f: f[0]), frame.pp, self.workload.optimizer,
            narrow=self.settings.narrow, remade=again, maximum=np.maximum,
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
