"""A layout's pipeline: which stages a rank has, what is in them, and the schedule that its ranks follow.

Stages, schedules and their legality are those of `schedule/pipeline`; this is where a layout asks for them. That room
is loaded when there is a pipeline: it needs numpy, which nothing else here does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from shardwise.errors import LayoutError, UserError
from shardwise.layout.layout import Layout
from shardwise.model.parameters import Model, blueprint
from shardwise.records import dataclass
from shardwise.report.step_report import Phase

if TYPE_CHECKING:
    from shardwise.schedule.pipeline import Action, PipelineSchedule
    from shardwise.schedule.pipeline.plan import StageLayers
    from shardwise.schedule.pipeline.simulate import Steady

_PHASES: dict[str, Phase] = {"F": "forward", "SEND_F": "forward", "RECV_F": "forward", "SHARE_LOSS": "loss"}


@lru_cache(maxsize=256)
def placement(layout: Layout) -> tuple[int, ...]:
    """Stage -> place among the pipeline's ranks."""
    from shardwise.schedule.pipeline import find

    return find(layout.schedule).placement(layout.pp, layout.virtual)


@lru_cache(maxsize=256)
def splits_backward(schedule: str, early: bool = False) -> bool:
    """Whether a schedule computes gradients of weights apart from those of inputs; early: as `build` has it."""
    from shardwise.schedule.pipeline import build, find

    small = build(schedule, 2, 8, find(schedule).virtual, early=early)
    return any(part.kind == "W" for mine in small.actions for action in mine for part in action.leaves())


def releases_early(layout: Layout) -> bool:
    """Whether gradients of inputs leave before those of weights are computed. Compiled blocks compute both at once; and
    where blocks are recomputed, what their products read would stay for a whole stage instead of one block."""
    return layout.compile != "block" and layout.recompute in ("none", "selective")


def stages(model: Model, layout: Layout) -> StageLayers:
    """The layers of each stage. Raises `LayoutError` when there are not enough of them."""
    from shardwise.schedule.pipeline.plan import StageLayers

    layers = sum(part.count for part in blueprint(model).of_kind("block"))
    try:
        if layout.stages:
            if sum(layout.stages) != layers:
                raise UserError(f"stages={layout.stages} adds up to {sum(layout.stages)} blocks, but it has {layers}")
            return StageLayers(layout.stages)
        return StageLayers.even(layers, layout.pp * layout.virtual)
    except UserError as error:
        raise LayoutError(f"{model.name}: {error}") from None


def objection(layout: Layout, micro_batches: int) -> str:
    """Why the schedule cannot have this many ranks, chunks and micro-batches, and what could; empty where it can."""
    from shardwise.schedule.pipeline import find, generators

    numbers = layout.pp, micro_batches, layout.virtual
    if not (legal := find(layout.schedule).objection(*numbers)):
        return ""
    words = re.sub(r"\bv\b", "virtual", re.sub(r"\bm\b", "micro-batches", legal))
    others = [each.name for each in generators() if each.train and not each.objection(*numbers)]
    return f"{words}; schedules that can: {', '.join(others)}" if others else words


def check_schedule(layout: Layout, micro_batches: int, hint: str = "") -> None:
    """Raise `LayoutError` where the schedule cannot have this many ranks, chunks and micro-batches."""
    if reason := objection(layout, micro_batches):
        raise LayoutError(
            f"schedule={layout.schedule} cannot have pp={layout.pp}, virtual={layout.virtual} and {micro_batches} "
            f"micro-batches a step: {reason}{hint}"
        )


@lru_cache(maxsize=64)
def training(layout: Layout, tied: bool, micro_batches: int, early: bool) -> PipelineSchedule:
    """Actions of every pipeline rank in one training step. early: as of `build`. Raises `LayoutError` for numbers that
    the schedule does not support, with legal ones."""
    try:
        numbers = layout.schedule, layout.pp, micro_batches, layout.virtual
        # Stages 0 and 1 have one order of a rank's work.
        return _training(*numbers, max(1, layout.stage), tied, early)
    except UserError as error:
        raise LayoutError(f"layout {layout}: {error}") from None


@lru_cache(maxsize=64)
def _training(
    schedule: str, pp: int, micro_batches: int, virtual: int, zero: int, tied: bool, early: bool
) -> PipelineSchedule:
    from shardwise.schedule.pipeline import build

    return build(schedule, pp, micro_batches, virtual, zero=zero, tied=tied, early=early)


@lru_cache(maxsize=256)
def steady(schedule: str, pp: int, micro_batches: int) -> Steady:
    """The short schedule with the same steady state as `micro_batches` micro-batches."""
    from shardwise.schedule.pipeline.simulate import steady

    return steady(schedule, pp, micro_batches)


@dataclass(frozen=True)
class RankSchedule:
    """The order in which one rank of a pipeline computes in a step."""

    layout: Layout
    pp_rank: int
    tied: bool
    early: bool
    """Whether gradients of inputs leave before those of weights are computed, which are few where weights are
    frozen."""
    micro_batches: Callable[[], int]
    """As of `Dtypes`."""

    @property
    def staged(self) -> bool:
        """Whether there is a pipeline."""
        return self.layout.pp > 1

    @cached_property
    def schedule(self) -> PipelineSchedule | None:
        """Actions of all pipeline ranks in one step, made action by action; None without a pipeline."""
        return training(self.layout, self.tied, self.micro_batches(), self.early) if self.staged else None

    @property
    def actions(self) -> tuple[Action, ...]:
        assert self.schedule is not None
        return self.schedule.actions[self.pp_rank]

    @cached_property
    def steady(self) -> Steady | None:
        """The shorter step with the same steady state; None without a pipeline, where every micro-batch but the first
        is like the next."""
        return steady(self.layout.schedule, self.layout.pp, self.micro_batches()) if self.staged else None

    @property
    def period(self) -> int:
        """Micro-batches of a period of the steady state."""
        return self.steady.period if self.steady else 1


@lru_cache(maxsize=64)
def evaluation(layout: Layout, tied: bool) -> PipelineSchedule:
    """One micro-batch through all stages, forward alone."""
    from shardwise.schedule.pipeline import Action, complete

    where = placement(layout)
    order = [[Action("F", stage, 0) for stage, rank in enumerate(where) if rank == mine] for mine in range(layout.pp)]
    return complete("evaluation", order, where, 1, train=False, gather=layout.stage == 3, tied=tied)


def phase_of(kind: str) -> Phase:
    """The phase of a step that an action belongs to."""
    return _PHASES.get(kind, "backward")


def phases(actions: tuple[Action, ...]) -> list[Phase]:
    """The phase of each action of one rank: a message's and a gather's is that of the computation which consumes it."""
    found: list[Phase] = []
    following: dict[int, Phase] = {}
    for action in reversed(actions):
        phase = phase_of(action.kind)
        if action.kind == "UNSHARD":
            phase = following[action.stage]
        for part in action.leaves():
            if part.kind in ("F", "I", "W", "B"):
                following[part.stage] = phase_of(part.kind)
        found.append(phase)
    return found[::-1]
