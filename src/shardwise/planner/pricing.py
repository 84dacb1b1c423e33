"""Seconds of many candidates at once, and of one layout alone.

Both go through the same functions of `predict.time`: one layout through `training_step`; a frame of candidates through
`PricedStep`, with the pieces of a micro-batch taken from a table that has each (tp, ep, cp, micro) of a space once, and
the traffic of the data ranks computed once a mesh.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from shardwise.arrays import Array, Num
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.keys import changed
from shardwise.model.parameters import Model
from shardwise.planner.exact import ExactMemory
from shardwise.planner.space import RECOMPUTE, BatchChoice, Homes, LayoutColumns, ScheduleChoice, ZeroChoice
from shardwise.predict.memory.engine_settings import USUAL, EngineSettings
from shardwise.predict.node_bytes import NOTHING, NodeBytes
from shardwise.predict.step_seconds import partly
from shardwise.predict.supported import in_closed_form
from shardwise.predict.time.pieces import Pieces, pieces
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile, attending
from shardwise.predict.time.ranges import Range, time_range
from shardwise.predict.time.split import StepShape
from shardwise.predict.time.step import PricedStep, bubble_share, narrow, training_step
from shardwise.predict.time.traffic import Traffic, traffic
from shardwise.records import dataclass
from shardwise.report.step_report import Bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Priced:
    """One candidate with its figures."""

    layout: Layout
    engine: EngineProfile
    seconds: float
    """Seconds per step."""
    parts: dict[str, float]
    """Seconds by part of the step; they add up to `seconds`."""
    range: Range
    """The 80% range of the seconds."""
    held: Bytes
    """Bytes of the fullest device."""
    place: int
    """The fullest device's place in the pipeline."""
    node: NodeBytes = NOTHING
    """Bytes off the devices of the fullest node."""


@lru_cache
def _inside(engine: EngineProfile) -> EngineProfile:
    """An engine without the overlaps that the pieces of a micro-batch do not depend on."""
    return replace(engine, grad_overlap=False, gather_overlap=False, pipeline_overlap=False)


@lru_cache
def _alone(engine: EngineProfile) -> EngineProfile:
    """An engine without overlaps, on which the traffic itself does not depend."""
    return replace(_inside(engine), tensor_overlap=False)


def price_one(
    model: Model,
    layout: Layout,
    workload: Workload,
    engine: EngineProfile,
    pricing: Pricing,
    exact: ExactMemory | None = None,
) -> Priced:
    """A layout's seconds and bytes. exact: kept between calls.

    Raises `UserError` where the batch does not divide, and for a layout that is in no search.
    """
    return price_all(model, [(layout, engine)], workload, pricing, exact)[0]


def price_all(
    model: Model,
    chosen: Sequence[tuple[Layout, EngineProfile]],
    workload: Workload,
    pricing: Pricing,
    exact: ExactMemory | None = None,
) -> list[Priced]:
    """Seconds and bytes of several layouts. Layouts that one call can price are priced together."""
    for layout, _ in chosen:
        check_priced(layout, workload)
    parts = _each(
        chosen,
        lambda of: (
            of[1],
            of[0].schedule,
            of[0].stages,
            of[0].pp,
            of[0].attention,
            of[0].cpkind,
            *(getattr(of[0], name) for name in Homes._fields),
        ),
        partial(_parts, model, workload, pricing, exact.settings if exact else USUAL),
    )
    names = {engine.name for _, engine in chosen}
    exacts = {name: exact or ExactMemory(model, workload, pricing.cluster, engine=name) for name in names}
    fullest = [exacts[engine.name].of(layout) for layout, engine in chosen]
    return [
        Priced(
            layout,
            engine,
            sum(mine.values()),
            mine,
            time_range(mine, pricing.constants, len(_notes(layout, pricing)), bool(model.experts), engine.uncertain),
            *rank,
            exacts[engine.name].node(layout),
        )
        for (layout, engine), mine, rank in zip(chosen, parts, fullest, strict=True)
    ]


def _notes(layout: Layout, pricing: Pricing) -> tuple[str, ...]:
    if layout.offload_home == "none":
        return ()
    return pricing.host.notes(layout.uses_disk)


def _each(things: Sequence[T], key: Callable[[T], Any], answer: Callable[[list[T]], list[Any]]) -> list[Any]:
    groups: dict[Any, list[int]] = {}
    for place, thing in enumerate(things):
        groups.setdefault(key(thing), []).append(place)
    found: dict[int, Any] = {}
    for group in groups.values():
        found |= dict(zip(group, answer([things[place] for place in group]), strict=True))
    return [found[place] for place in range(len(things))]


def _parts(
    model: Model, workload: Workload, pricing: Pricing, settings: EngineSettings,
    chosen: list[tuple[Layout, EngineProfile]],
) -> list[dict[str, float]]:  # fmt: skip
    if settings.layers:
        whole = replace(settings, layers=0)
        full = [(replace(layout, recompute="full"), engine) for layout, engine in chosen]
        pairs = (_parts(model, workload, pricing, whole, each) for each in (chosen, full))
        return [partly(settings.recomputed(model.layers, layout.pp * layout.virtual), *both)
                for (layout, _), *both in zip(chosen, *pairs, strict=True)]  # fmt: skip
    splits = [StepShape.of(layout, workload, settings.dtype) for layout, _ in chosen]
    columns: dict[str, Any] = {name: np.array([getattr(split, name) for split in splits]) for name in _COLUMNS}
    software = attending(chosen[0][1], chosen[0][0].attention)
    step = training_step(model, replace(splits[0], **columns), software, pricing)
    parts = {name: np.broadcast_to(np.asarray(part, dtype=float), len(splits)) for name, part in step.parts.items()}
    return [{name: float(part[i]) for name, part in parts.items()} for i in range(len(splits))]


_COLUMNS = ("micro_batches", "tp", "pp", "dp", "ep", "virtual", *BatchChoice._fields, *ZeroChoice._fields)
"""Fields of a split that may be arrays."""


def check_priced(layout: Layout, workload: Workload) -> None:
    """Raise `UserError` where the batch does not divide, and for a layout that has no price."""
    for key, value in changed(layout).items():
        if not key.marks & {"searched", "priced"}:
            raise UserError(f"the planner does not price {key.text(value)} yet")
    if layout.recompute not in RECOMPUTE:
        raise UserError(f"the planner does not price recompute={layout.recompute} yet")
    count = workload.micro_batches(layout)
    if layout.pp > 1 and not in_closed_form(layout.schedule, layout.virtual, layout.pp, count):
        raise UserError(
            f"schedule={layout.schedule} with pp={layout.pp}, virtual={layout.virtual} and {count} micro-batches has "
            "no closed form that the planner knows"
        )


class Prices:
    """Seconds of the candidates of frames that are known beforehand."""

    def __init__(
        self, model: Model, workload: Workload, attention: str, pricing: Pricing, frames: Iterable[LayoutColumns],
        settings: EngineSettings = USUAL,
    ) -> None:  # fmt: skip
        self.model, self.workload, self.attention, self.pricing = model, workload, attention, pricing
        self._dtype, self._settings = settings.dtype or StepShape.dtype, settings
        modes = (None, "full") if settings.layers else (None,)
        rows = dict.fromkeys(
            (f.tp, f.ep, *row._replace(recompute=mode or row.recompute))
            for mode in modes
            for f in frames
            for row in f.rows
        )
        self._row = {row: index for index, row in enumerate(rows)}
        self._numbers = [np.array(column) for column in zip(*rows, strict=True)]
        self._table = cache(self._pieces)
        self._share = cache(self._shares)
        self._sent = lru_cache(maxsize=2)(self._traffic)

    def seconds(self, frame: LayoutColumns, engine: EngineProfile) -> Num:
        """Seconds of a step for each candidate, an array of the frame's shape; values of
        candidates that are not `possible` have no meaning."""
        without = self._seconds(frame, engine)
        if not self._settings.layers:
            return without
        chunks = (frame.pp * order.virtual for order in frame.orders)
        share = np.array([self._settings.recomputed(self.model.layers, count) for count in chunks])
        full = replace(frame, rows=tuple(row._replace(recompute="full") for row in frame.rows))
        return without + (self._seconds(full, engine) - without) * share

    def _seconds(self, frame: LayoutColumns, engine: EngineProfile) -> Num:
        software = attending(engine, self.attention)
        rows = np.array([self._row[frame.tp, frame.ep, *row] for row in frame.rows])
        inside = _inside(software)
        found = self._table(inside).each(lambda column: column[rows][:, None, None])
        share = np.stack([self._share(inside, order)[rows] for order in frame.orders], axis=-1)[:, None, :]
        sent = self._sent(frame, _alone(software))
        parts = PricedStep(self.model, self._split(frame), software, self.pricing, found, sent, share).parts()
        return sum(parts.values())

    def _split(self, frame: LayoutColumns) -> StepShape:
        homes = frame.homes.layout
        # As of `layers_held`; one number where all orders have it, which keeps other arrays small.
        most, last = np.array([(max(held[:-1], default=0), held[-1]) for held in frame.held]).T
        return StepShape(
            **{name: column for name, column in frame.columns.items() if name in _COLUMNS},
            seq=self.workload.seq,
            micro_batches=np.array(frame.counts)[:, None, None],
            tp=frame.tp,
            pp=frame.pp,
            held=(narrow(most), narrow(last)) if frame.pp > 1 else None,
            schedule=np.array([order.schedule for order in frame.orders]),
            dp=frame.data // frame.columns["cp"],
            ep=frame.ep,
            offload=homes.offload_home,
            offloaded=homes.offload_fraction,
            offload_params=homes.offload_params,
            optimizer=self.workload.optimizer,
            dtype=self._dtype,
        )

    def _pieces(self, engine: EngineProfile) -> Pieces:
        tp, ep, cp, sp, recompute, micro = self._numbers
        split = StepShape(
            seq=self.workload.seq, tp=tp, ep=ep, cp=cp, micro=micro, sp=sp, recompute=recompute, dtype=self._dtype
        )
        found = pieces(self.model, split, engine, self.pricing).joined()
        return found.each(lambda column: np.broadcast_to(column, len(self._row)))

    def _shares(self, engine: EngineProfile, order: ScheduleChoice) -> Array:
        share = bubble_share(order.schedule, order.virtual, self._table(engine))
        return np.broadcast_to(share, len(self._row))

    def _traffic(self, frame: LayoutColumns, engine: EngineProfile) -> Traffic:
        # To the data ranks' traffic, a sequence cut over cp is shorter sequences on as many ranks more: one mesh.
        split = self._split(frame)
        mesh = replace(split, micro=split.micro / split.cp, dp=frame.data, cp=1)
        several = split.micro_batches > 1
        if engine.grad_bytes != "plan" or not np.any(several):
            return traffic(self.model, replace(mesh, micro_batches=1), engine, self.pricing)
        # Gradients of several micro-batches are wider.
        more = traffic(self.model, replace(mesh, micro_batches=2), engine, self.pricing)
        if np.all(several):
            return more
        one = traffic(self.model, replace(mesh, micro_batches=1), engine, self.pricing)
        return more.where(several, one)
