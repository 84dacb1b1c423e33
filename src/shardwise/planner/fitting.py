"""Bytes that a device needs, for many candidates at once.

The same figures as `predict.memory.step` gives one rank at a time: what autograd saves and what is transient come from
its functions, once for each micro-batch size and way to keep activations; the units' sizes from the `UnitPlan`; and the
order in which gradients come and activations go, for arrays of candidates, from `moments.py` and `pipelined.py`. A test
holds the two to each other.

A pipeline's fullest rank is its first, its second or its last: ranks between hold no more blocks or micro-batches than
the second, and neither embedding nor head. Where the model's first blocks have no experts, the first ranks that have
them in all of theirs can be it, too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import numpy as np

from shardwise.layout import Layout, UnitPlan, Workload, unit_plan
from shardwise.layout.units import Unit
from shardwise.model import ModelConfig
from shardwise.planner.mixed import Mixed, alike, more
from shardwise.planner.moments import Alone, Rank, Saved
from shardwise.planner.pipelined import Between, First, Last
from shardwise.planner.space import LayoutColumns
from shardwise.predict.memory import peak
from shardwise.predict.memory.activations import Sizes, kept_items, saved_items
from shardwise.report.step_report import Bytes

Num = Any
"""A number, or an array of numbers: rows x shardings x orders of a frame."""

CLASSES = ("parameters", "gradients", "optimizer", "saved", "comm")


class CandidateMemory(NamedTuple):
    """Bytes of a device by class, the most of each at one time, and at the worst moment (`total`)."""

    parameters: Num
    gradients: Num
    optimizer: Num
    saved: Num
    comm: Num
    total: Num

    def classes(self) -> Bytes:
        """As a report's bytes; for one candidate."""
        return Bytes.of(round(self.total), **{name: round(getattr(self, name)) for name in CLASSES})

    def to_json(self) -> dict[str, int]:
        return self.classes().to_json() | {"total": round(self.total)}


def places(model: ModelConfig, pp: int) -> list[int]:
    """The ranks of a pipeline that can be the fullest, in the order of `Memory.ends`."""
    last = pp - 1
    found = {0, min(1, last), last}
    if model.experts and (dense := model.experts.dense_layers):
        # The first ones that have experts in all of their blocks, without chunks and with the smallest ones.
        each, rest = divmod(model.layers, pp)
        found |= {next((p for p in range(pp) if p * each + min(p, rest) >= dense), last), min(dense, last)}
    return sorted(found)


class Memory:
    """What candidates of one model and workload need, on devices whose collectives are NCCL's or alike."""

    def __init__(self, model: ModelConfig, workload: Workload, attention: str) -> None:
        self.model, self.workload, self.attention = model, workload, attention
        # Its blocks are alike.
        self._one_block = alike(model).replace(layers=1)
        self._saved, self._units = cache(self._one), cache(self._of_tp)
        self._mixed = cache(partial(Mixed, model)) if model.experts or model.latent_attention else lambda tp: None

    def of(self, frame: LayoutColumns) -> CandidateMemory:
        """The fullest rank of each candidate of a frame, arrays of its shape or smaller ones that broadcast to it."""
        fullest, *others = self.ends(frame)
        for end in others:
            fuller = fullest.total >= end.total
            fullest = CandidateMemory(*(np.where(fuller, one, other) for one, other in zip(fullest, end, strict=True)))
        return fullest

    def total(self, frame: LayoutColumns) -> Num:
        """The bytes of the fullest rank of each candidate, an array of the frame's shape."""
        few, row = self._distinct(frame)
        totals = [end.total for end in self.ends(few)]
        return np.broadcast_to(reduce(np.maximum, totals), few.shape)[row]

    def ends(self, frame: LayoutColumns) -> tuple[CandidateMemory, ...]:
        """The ranks of each candidate's pipeline that can be the fullest, as `places` names them."""
        rows = [self._saved(frame.tp, *row) for row in frame.rows]
        saved = Saved(*(np.array(column, dtype=float)[:, None, None] for column in zip(*rows, strict=True)))
        units, mixed = self._units(frame.tp), self._mixed(frame.tp)
        kinds: dict[int, type[Rank]] = {0: First, frame.pp - 1: Last} if frame.pp > 1 else {0: Alone}
        return tuple(
            CandidateMemory(*kinds.get(place, Between)(self.model, frame, place, units, saved, mixed).held())
            for place in places(self.model, frame.pp)
        )

    def _distinct(self, frame: LayoutColumns) -> tuple[LayoutColumns, list[int]]:
        """The frame with those rows only that differ in memory, and which of them stands for each row.

        Without explicit attention or masks, bytes depend on a micro-batch's tokens and not on the length of its
        sequences; but of a single one, pieces are cut without a copy.
        """
        if self.attention != "sdpa" or self.workload.isolate_documents:
            return frame, list(range(len(frame.rows)))
        few: dict[Any, int] = {}
        rows, where = [], []
        for row in frame.rows:
            key = row.sp, row.recompute, row.micro == 1, row.micro * self.workload.seq // row.cp
            if key not in few:
                few[key] = len(few)
                rows.append(row)
            where.append(few[key])
        return replace(frame, rows=tuple(rows)), where

    def _plan(self, micro_batches: int, **layout: Any) -> UnitPlan:
        made = Layout(attention=self.attention, **layout)
        workload = replace(self.workload, batch=made.micro * micro_batches)
        return unit_plan(self._one_block, made, workload, backend="nccl")

    def _one(self, tp: int, cp: int, sp: bool, recompute: str, micro: int) -> Saved:
        plan = self._plan(1, tp=tp, cp=cp, sp=sp, recompute=recompute, micro=micro)
        s, parts = Sizes.of(plan), ["embedding", "blocks.0", "head"]
        embedding, block, head = (sum(saved_items(plan, s, part).values()) for part in parts)
        moments, apart = (peak.backwards(plan, s, parts, late) for late in (False, True))
        extra = more(self.model, s, recompute)
        return Saved(
            embedding + extra.embedding,
            block + extra.block,
            head,
            kept_embedding=sum(kept_items(plan, s, "embedding").values()),
            kept_block=sum(kept_items(plan, s, "blocks.0").values()) + extra.kept,
            kept_head=sum(kept_items(plan, s, "head").values()),
            known_embedding=peak.saved_inputs(plan, s, "embedding"),
            known_head=peak.saved_inputs(plan, s, "head"),
            loss=peak.loss(plan, s),
            in_head=moments["backward", "head"] - embedding - block - head,
            in_block=moments["backward", "blocks.0"] - embedding - block + extra.in_block,
            in_block_apart=apart["backward", "blocks.0"] - embedding - block + extra.in_block,
            in_embedding=moments["backward", "embedding"],
            after_block=moments["reduction", "blocks.0"] - embedding,
            after_edge=moments["reduction", "embedding"],
            inputs=peak.inputs(plan, s),
            tables=peak.tables(plan, s),
            message=s.stream * s.hidden * s.element,
        )

    def _of_tp(self, tp: int) -> dict[str, Unit]:
        return unit_plan(self._one_block, Layout(tp=tp), self.workload, backend="nccl").by_name
