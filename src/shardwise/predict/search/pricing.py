"""Seconds of many candidates at once, and of one layout alone.

Both go through the same functions of `predict.time`: one layout through `training_step`; a frame of candidates through
`step_parts`, with the pieces of a micro-batch taken from a table that has each (tp, cp, micro) of a space once, and the
traffic of the data ranks computed once a mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.predict.search.fitting import Held, Memory
from shardwise.predict.search.space import RECOMPUTE, Activation, Frame, Order, Sharding, in_closed_form
from shardwise.predict.time.pieces import Pieces, pieces
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import Engine
from shardwise.predict.time.ranges import Range, time_range
from shardwise.predict.time.split import Split
from shardwise.predict.time.step import bubble_share, step_parts, training_step
from shardwise.predict.time.traffic import Traffic, traffic

Num = Any


@dataclass(frozen=True)
class Priced:
    """One candidate with its figures.

    seconds: of a step; parts: where they go, adding up to it; range: its 80% range. held: bytes of the fullest device,
    which is on the pipeline's rank `place`.
    """

    layout: Layout
    engine: Engine
    seconds: float
    parts: dict[str, float]
    range: Range
    held: Held
    place: int


def attending(engine: Engine, attention: str) -> Engine:
    """The engine with explicit attention where a layout has it and the engine would not."""
    return replace(engine, attention="scores") if attention == "math" and engine.attention != "scores" else engine


@lru_cache
def _inside(engine: Engine) -> Engine:
    """An engine without the overlaps that the pieces of a micro-batch do not depend on."""
    return replace(engine, grad_overlap=False, gather_overlap=False, pipeline_overlap=False)


@lru_cache
def _alone(engine: Engine) -> Engine:
    """An engine without overlaps, on which the traffic itself does not depend."""
    return replace(_inside(engine), tensor_overlap=False)


def price_one(
    model: ModelConfig,
    layout: Layout,
    workload: Workload,
    engine: Engine,
    pricing: Pricing,
    memory: Memory | None = None,
) -> Priced:
    """A layout's seconds and bytes. memory: kept between calls by whoever asks for many.

    Raises `UserError` where the batch does not divide, and for a layout that no search comes upon.
    """
    software = attending(engine, layout.attention)
    step = training_step(model, Split.of(layout, workload), software, pricing)
    parts = {name: float(part) for name, part in step.parts.items()}
    seconds = sum(parts.values())
    memory = memory or Memory(model, workload, layout.attention)
    ends = [Held(*(float(np.ravel(figure)[0]) for figure in end)) for end in memory.ends(frame_of(layout, workload))]
    place = max(range(len(ends)), key=lambda end: ends[end].total)
    return Priced(
        layout,
        engine,
        seconds,
        parts,
        time_range(parts, pricing.constants),
        ends[place],
        place * (layout.pp - 1),
    )


def frame_of(layout: Layout, workload: Workload) -> Frame:
    """The frame that has this layout alone. Raises `UserError` where the batch does not divide, and for a layout that
    no search comes upon."""
    usual = Layout()
    for key in ("ep", "etp", "hpz", "stages", "offload", "compile", "precision", "grads", "order"):
        if (value := getattr(layout, key)) != getattr(usual, key):
            raise UserError(f"the planner does not price {key}={value} yet")
    if layout.recompute not in RECOMPUTE:
        raise UserError(f"the planner does not price recompute={layout.recompute} yet")
    count = workload.micro_batches(layout)
    if layout.pp > 1 and not in_closed_form(layout.schedule, layout.virtual, layout.pp, count):
        raise UserError(
            f"schedule={layout.schedule} with pp={layout.pp}, virtual={layout.virtual} and {count} micro-batches has "
            "no closed form that the planner knows"
        )
    order = Order(layout.schedule, layout.virtual) if layout.pp > 1 else Order("1f1b", 1)
    return Frame(
        layout.tp, layout.pp, layout.cp, layout.dp, layout.attention, workload.batch,
        (Activation(layout.sp, layout.recompute),), (layout.micro,),
        (Sharding(layout.stage, layout.shard_ranks if layout.stage else 1),), (order,),
    )  # fmt: skip


class Prices:
    """Seconds of the candidates of frames that are known beforehand."""

    def __init__(
        self, model: ModelConfig, workload: Workload, attention: str, pricing: Pricing, frames: Iterable[Frame]
    ) -> None:
        self.model, self.workload, self.attention, self.pricing = model, workload, attention, pricing
        rows = dict.fromkeys((f.tp, f.cp, micro, *activation) for f in frames for activation, micro in f.rows)
        self._row = {row: index for index, row in enumerate(rows)}
        self._numbers = [np.array(column) for column in zip(*rows, strict=True)]
        self._table = cache(self._pieces)
        self._share = cache(self._shares)
        self._sent = lru_cache(maxsize=2)(self._traffic)

    def seconds(self, frame: Frame, engine: Engine) -> Num:
        """Seconds of a step for each candidate, an array of the frame's shape; those that are not `possible` have
        figures without meaning."""
        software = attending(engine, self.attention)
        rows = np.array([self._row[frame.tp, frame.cp, micro, *activation] for activation, micro in frame.rows])
        inside = _inside(software)
        found = self._table(inside).each(lambda column: column[rows][:, None, None])
        share = np.stack([self._share(inside, order)[rows] for order in frame.orders], axis=-1)[:, None, :]
        sent = self._sent(frame, _alone(software))
        parts = step_parts(self.model, self._split(frame), software, self.pricing, found, sent, share)
        return sum(parts.values())

    def _split(self, frame: Frame) -> Split:
        return Split(
            seq=self.workload.seq,
            micro=np.array([micro for _, micro in frame.rows])[:, None, None],
            micro_batches=np.array(frame.counts)[:, None, None],
            tp=frame.tp,
            pp=frame.pp,
            dp=frame.dp,
            cp=frame.cp,
            virtual=np.array([order.virtual for order in frame.orders])[None, None, :],
            shard=np.array([sharding.ranks for sharding in frame.shardings])[None, :, None],
            zero=np.array([sharding.stage for sharding in frame.shardings])[None, :, None],
            sp=np.array([activation.sp for activation, _ in frame.rows])[:, None, None],
            recompute=np.array([activation.recompute for activation, _ in frame.rows])[:, None, None],
        )

    def _pieces(self, engine: Engine) -> Pieces:
        tp, cp, micro, sp, recompute = self._numbers
        split = Split(seq=self.workload.seq, tp=tp, cp=cp, micro=micro, sp=sp, recompute=recompute)
        found = pieces(self.model, split, engine, self.pricing).joined()
        return found.each(lambda column: np.broadcast_to(column, len(self._row)))

    def _shares(self, engine: Engine, order: Order) -> Num:
        # Candidates have as many micro-batches as the closed form wants: two ranks with two stand for all.
        share = bubble_share(order.schedule, 2, 2, order.virtual, self._table(engine))
        return np.broadcast_to(share, len(self._row))

    def _traffic(self, frame: Frame, engine: Engine) -> Traffic:
        return traffic(self.model, self._split(frame), engine, self.pricing)
