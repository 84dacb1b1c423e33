"""A lower bound of a device's bytes, for many candidates at once: of their fullest rank.

What may fit by the bound is followed event by event (`exact.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property, partial, reduce
from itertools import product
from typing import Any

import numpy as np

from shardwise.layout import Layout, UnitPlan, Workload, unit_plan
from shardwise.layout.units import Backend, Unit
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Blueprint
from shardwise.model.parameters import Model
from shardwise.planner.rank_bound import MicroBatchBytes, Num, RankBound
from shardwise.planner.space import BatchChoice, LayoutColumns
from shardwise.predict.memory import peak
from shardwise.predict.memory.activations import Sizes, kept_items, saved_items
from shardwise.predict.memory.latent_tensors import block_tensors


def places(model: Model, pp: int, schedule: str = "") -> list[int]:
    """The ranks of a pipeline that can be the fullest under a schedule, "" for any.

    Of ranks between the ends with as many blocks, the first holds most micro-batches; only zb-h1 delays gradients of
    weights the longer, the later a rank is.
    """
    if isinstance(model, Blueprint):  # whose blocks may all differ
        return list(range(pp))
    last, (each, rest) = pp - 1, divmod(model.layers, pp)
    found = {0, min(1, last), last}
    if schedule in ("", "zb-h1"):
        found |= {max(0, rest - 1), rest, max(0, last - 1)}
    if model.experts and (dense := model.experts.dense_layers):
        # The first ones that have experts in all of their blocks, without chunks and with the smallest ones.
        found |= {next((p for p in range(pp) if p * each + min(p, rest) >= dense), last), min(dense, last)}
    if every := model.full_attention_every:  # stages have more or fewer blocks with windows by turns
        starts = (1, rest - every, rest, last - every)
        found |= {min(max(start + offset, 0), last) for start in starts for offset in range(every)}
    return sorted(found)


class ExactBound:
    """Bytes of candidates of a traced module, followed one by one: there are few."""

    def __init__(self, total: Callable[[Layout], float]) -> None:
        self._total = total

    def total(self, frame: LayoutColumns) -> Num:
        """As of `MemoryBound`."""
        candidates = product(frame.rows, frame.shardings, frame.orders)
        return np.array([float(self._total(frame.layout(*each))) for each in candidates]).reshape(frame.shape)


class MemoryBound:
    """Least bytes of candidates of one model and workload."""

    def __init__(self, model: ModelConfig, workload: Workload, attention: str, backend: Backend) -> None:
        self.model, self.workload, self.attention, self.backend = model, workload, attention, backend
        self._units = cache(self._of_tp)
        self._rows: dict[Any, MicroBatchBytes] = {}

    def total(self, frame: LayoutColumns) -> Num:
        """At least the bytes of each candidate's fullest rank, an array of the frame's shape."""
        few, row = self._distinct(frame)
        schedules = {order.schedule for order in frame.orders}
        ranks = places(self.model, frame.pp, "zb-h1" if "zb-h1" in schedules else "1f1b")
        most = reduce(np.maximum, (self.of_rank(few, place) for place in ranks))
        return np.broadcast_to(most, few.shape)[row]

    def of_rank(self, frame: LayoutColumns, place: int) -> Num:
        """At least the bytes of the rank at one place of each candidate's pipeline."""
        rows = [self._row(frame.tp, frame.ep, row) for row in frame.rows]
        columns = (np.array(column, dtype=float)[:, None, None] for column in zip(*rows, strict=True))
        units, optimizer = self._units(frame.tp), self.workload.optimizer
        return RankBound(self.model, frame, place, units, MicroBatchBytes(*columns), self.backend, optimizer).total()

    def _distinct(self, frame: LayoutColumns) -> tuple[LayoutColumns, list[int]]:
        """The frame with those rows only that differ in memory, and which of them stands for each row."""
        first: dict[Any, int] = {}
        where = [first.setdefault(self._alike(row), len(first)) for row in frame.rows]
        rows = tuple(frame.rows[where.index(at)] for at in range(len(first)))
        return replace(frame, rows=rows), where

    def _alike(self, row: BatchChoice) -> Any:
        """Equal for rows of the same bytes: on CUDA, without explicit attention or masks, they depend on the tokens of
        a micro-batch and not on the length of its sequences; but of a single one, pieces are cut without a copy."""
        if self.attention != "sdpa" or self.workload.isolate_documents or self.backend != "nccl":
            return row
        return row.cp, row.sp, row.recompute, row.micro == 1, row.micro * self.workload.seq

    def _row(self, tp: int, ep: int, row: BatchChoice) -> MicroBatchBytes:
        key = tp, ep, self._alike(row)
        if key not in self._rows:
            # Of blocks with experts and without them, the least of each number.
            sorts = (self._micro_batch(model, tp, ep, *row) for model in self._one_block)
            self._rows[key] = MicroBatchBytes(*map(min, zip(*sorts, strict=True)))
        return self._rows[key]

    @cached_property
    def _one_block(self) -> list[ModelConfig]:
        """Models of one block for each sort of blocks that the model has."""
        one, e = partial(self.model.replace, layers=1), self.model.experts
        mixed = [one(experts=replace(e, dense_layers=0))] if e and e.dense_layers < self.model.layers else []
        return mixed + ([one(experts=None)] if not e or e.dense_layers else [])

    def _plan(self, model: ModelConfig, **layout: Any) -> UnitPlan:
        made = Layout(attention=self.attention, **layout)
        workload = replace(self.workload, batch=made.micro * made.dp)
        return unit_plan(model, made, workload, backend=self.backend)

    def _micro_batch(
        self, model: ModelConfig, tp: int, ep: int, cp: int, sp: bool, recompute: str, micro: int
    ) -> MicroBatchBytes:
        spread = {"ep": ep, "dp": ep} if model.experts else {}
        plan = self._plan(model, tp=tp, cp=cp, sp=sp, recompute=recompute, micro=micro, **spread)
        s, parts = Sizes.of(plan), ["embedding", "blocks.0", "head"]
        embedding, block, head = (sum(saved_items(plan, s, part).values()) for part in parts)
        in_block, in_block_apart = (block_tensors(plan, s, parts[1], apart).backward(False) for apart in (False, True))
        in_embedding, in_embedding_apart = (
            peak.backwards(plan, s, parts[:1], apart)["backward", "embedding"] for apart in (False, True)
        )
        return MicroBatchBytes(
            embedding=embedding,
            block=block,
            head=head,
            known_embedding=peak.saved_inputs(plan, s, "embedding"),
            known_head=peak.saved_inputs(plan, s, "head"),
            kept_embedding=sum(kept_items(plan, s, "embedding").values()),
            kept_block=sum(kept_items(plan, s, "blocks.0").values()),
            loss=peak.loss(plan, s),
            in_head=peak.backwards(plan, s, parts[2:])["backward", "head"] - head,
            in_block=in_block,
            in_block_apart=in_block_apart,
            in_embedding=in_embedding,
            in_embedding_apart=in_embedding_apart,
            inputs=s.tokens * 8 * (1 + (self.model.positions != "learned")),
            tables=self._tables(plan, s),
        )

    def _tables(self, plan: UnitPlan, s: Sizes) -> int:
        """Bytes that the blocks of a rank share at least: where some blocks have windows, a rank may have others."""
        if not self.model.full_attention_every:
            return peak.tables(plan, s)
        everywhere = self.model.replace(layers=1, window=0, full_attention_every=0)
        plain = unit_plan(everywhere, plan.layout, plan.workload, backend=self.backend)
        return min(peak.tables(plan, s), peak.tables(plain, Sizes.of(plain)))

    def _of_tp(self, tp: int) -> dict[str, Unit]:
        one_block = self.model.replace(layers=1, experts=None)
        return unit_plan(one_block, Layout(tp=tp), self.workload, backend=self.backend).by_name
