"""Bytes that a device needs, for many candidates at once.

The same figures as `predict.memory` gives one rank at a time: what autograd saves and what is transient come from its
functions, once for each micro-batch size and way to keep activations; the units' sizes from the `UnitPlan`; and the
order in which gradients come and activations go, for arrays of candidates, from `moments.py` and `pipelined.py`. A test
holds the two to each other.

A pipeline's fullest rank is its first or its last: ranks between hold no more blocks or micro-batches than the first,
and neither embedding nor head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from shardwise.layout import Layout, UnitPlan, Workload, unit_plan
from shardwise.layout.units import Unit
from shardwise.model import ModelConfig
from shardwise.predict import peak
from shardwise.predict.activations import Sizes, kept_items, saved_items
from shardwise.predict.search.moments import Alone, Saved
from shardwise.predict.search.pipelined import First, Last
from shardwise.predict.search.space import Frame
from shardwise.report.step_report import Bytes

Num = Any
"""A number, or an array of numbers: rows x shardings x orders of a frame."""

RESERVED_BYTES = 2e9
"""Of a device's memory, what the driver's context and loaded kernels take: 0.5 to 2 GB, stas00/ml-engineering,
training/performance/README.md. Fragmentation is not in it."""

CLASSES = ("parameters", "gradients", "optimizer", "saved", "comm")


class Held(NamedTuple):
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


class Memory:
    """What candidates of one model and workload need, on devices whose collectives are NCCL's or alike."""

    def __init__(self, model: ModelConfig, workload: Workload, attention: str) -> None:
        self.model, self.workload, self.attention = model, workload, attention
        # Its blocks are alike.
        self._one_block = model.replace(layers=1)
        self._saved, self._units = cache(self._one), cache(self._of_tp)

    def of(self, frame: Frame) -> Held:
        """The fullest rank of each candidate of a frame, arrays of its shape or smaller ones that broadcast to it."""
        first, *others = self.ends(frame)
        if not others:
            return first
        fuller = first.total >= others[0].total
        return Held(*(np.where(fuller, one, other) for one, other in zip(first, others[0], strict=True)))

    def ends(self, frame: Frame) -> tuple[Held, ...]:
        """The first and the last rank of each candidate's pipeline; without one, the only."""
        rows = [self._saved(frame.tp, frame.cp, *activation, micro) for activation, micro in frame.rows]
        saved = Saved(*(np.array(column, dtype=float)[:, None, None] for column in zip(*rows, strict=True)))
        units = self._units(frame.tp)
        if frame.pp == 1:
            return (Held(*Alone(self.model, frame, units, saved).held()),)
        return tuple(Held(*end(self.model, frame, units, saved).held()) for end in (First, Last))

    def _plan(self, micro_batches: int, **layout: Any) -> UnitPlan:
        made = Layout(attention=self.attention, **layout)
        workload = replace(self.workload, batch=made.micro * micro_batches)
        return unit_plan(self._one_block, made, workload, backend="nccl")

    def _one(self, tp: int, cp: int, sp: bool, recompute: str, micro: int) -> Saved:
        plan = self._plan(1, tp=tp, cp=cp, sp=sp, recompute=recompute, micro=micro)
        s, parts = Sizes.of(plan), ["embedding", "blocks.0", "head"]
        embedding, block, head = (sum(saved_items(plan, s, part).values()) for part in parts)
        moments, apart = (peak.backwards(plan, s, parts, late) for late in (False, True))
        return Saved(
            embedding,
            block,
            head,
            kept_embedding=sum(kept_items(plan, s, "embedding").values()),
            kept_block=sum(kept_items(plan, s, "blocks.0").values()),
            kept_head=sum(kept_items(plan, s, "head").values()),
            known_embedding=peak.saved_inputs(plan, s, "embedding"),
            known_head=peak.saved_inputs(plan, s, "head"),
            loss=peak.loss(s),
            in_head=moments["backward", "head"] - embedding - block - head,
            in_block=moments["backward", "blocks.0"] - embedding - block,
            in_block_apart=apart["backward", "blocks.0"] - embedding - block,
            in_embedding=moments["backward", "embedding"],
            after_block=moments["reduction", "blocks.0"] - embedding,
            after_edge=moments["reduction", "embedding"],
            inputs=peak.inputs(plan, s),
            tables=peak.tables(plan, s),
            message=s.stream * s.hidden * s.element,
        )

    def _of_tp(self, tp: int) -> dict[str, Unit]:
        return unit_plan(self._one_block, Layout(tp=tp), self.workload, backend="nccl").by_name
