"""Memory of a pipeline rank after each action of its list, in bytes.

The list says which micro-batches are between their forward and their backward, which messages lie ready, which stages
are gathered and which gradients are on their way. What each action changes is `pipeline_action`'s, once for each
situation in which it comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.layout.gathers import Residency, packed_bytes, stage_units
from shardwise.layout.unit import Unit
from shardwise.layout.units import UnitPlan
from shardwise.predict.memory.buffers import MemoryTrace
from shardwise.predict.memory.outer import outer_transient
from shardwise.predict.memory.peak import optimizer
from shardwise.predict.memory.pipeline_action import Change, Effect, RankStages
from shardwise.predict.memory.traced import trace_of
from shardwise.predict.traffic.ledger import message_of
from shardwise.records import dataclass
from shardwise.report.step_report import DTYPE_BYTES

if TYPE_CHECKING:
    from shardwise.predict.memory.traced_stages import TracedRankStages
    from shardwise.schedule.pipeline import Action


@dataclass
class MemoryPeak:
    """The most bytes at one time within a step: of each class, and of all that does not last through it."""

    saved: int = 0
    gradients: int = 0
    comm: int = 0
    peak: int = 0
    stored: int = 0
    """Saved activations in the host's memory."""

    @property
    def bytes(self) -> tuple[int, int, int, int, int]:
        """In the order of the fields."""
        return self.saved, self.gradients, self.comm, self.peak, self.stored

    def include(self, other: MemoryPeak) -> None:
        """Count another part of the step, too."""
        self.saved, self.gradients, self.comm, self.peak, self.stored = map(
            max, zip(self.bytes, other.bytes, strict=True)
        )


def held_by_actions(plan: UnitPlan) -> MemoryPeak:
    """Follow the actions of `plan`'s rank through one step, those of its steady state once."""
    assert plan.pipeline.steady is not None
    if plan.routed:
        return _followed(plan)
    if plan.pipeline.steady.grows and plan.pipeline.steady.repeats:
        return _continued(plan)
    return _followed(plan.short, stages_of(plan).inputs)


def _followed(plan: UnitPlan, lasting: int | None = None) -> MemoryPeak:
    rank = _Rank(plan, lasting)
    for action in plan.pipeline.actions:
        rank.do(action)
    return rank.end()


def _continued(plan: UnitPlan) -> MemoryPeak:
    """Memory where a rank holds more the more micro-batches there are: by as much at every further period, which two
    short steps show for each action."""
    from shardwise.schedule.pipeline.simulate import continuation

    assert plan.pipeline.steady is not None
    lasting, short, longer = stages_of(plan).inputs, plan.short, plan.longer
    a, b = _by_action(short, lasting), _by_action(longer, lasting)
    most = MemoryPeak()
    for one, place in zip(a, [*continuation(short.pipeline.actions, longer.pipeline.actions), -1], strict=True):
        both = zip(one.bytes, b[place].bytes, strict=True)
        most.include(MemoryPeak(*(x + plan.pipeline.steady.repeats * (y - x) for x, y in both)))
    return most


def _by_action(plan: UnitPlan, lasting: int) -> list[MemoryPeak]:
    """The most while each action is done, and in the end."""
    rank, found = _Rank(plan, lasting), []
    for action in plan.pipeline.actions:
        rank.most = MemoryPeak()
        rank.do(action)
        found.append(rank.most)
    rank.most = MemoryPeak()
    return [*found, rank.end()]


@dataclass(frozen=True)
class UnderWay:
    """Micro-batches that a rank saves activations of, when these are the most."""

    saved: Counter[int]
    """Stage -> those between their forward and the gradients of their inputs."""
    kept: Counter[int]
    """Stage -> those of which tensors are kept for the gradients of weights alone."""
    attending: int
    """Those on any stage with attention: each has a mask."""


def most_under_way(plan: UnitPlan) -> UnderWay:
    """What `held_by_actions` counts as saved, by stage."""
    assert plan.pipeline.steady is not None
    grows = plan.pipeline.steady.grows and plan.pipeline.steady.repeats
    rank = _CountingRank(plan if grows else plan.short, stages_of(plan).inputs)
    for action in rank.plan.pipeline.actions:
        rank.do(action)
    return rank.best


class MemoryEvent(NamedTuple):
    """Bytes at one moment of a step, of what does not last through it. place: of the action in the rank's list, whose
    length stands for the optimizer. gradients, comm: of the engine; rest: activations and all that is transient."""

    place: int
    gradients: int
    comm: int
    rest: int

    @property
    def total(self) -> int:
        return self.gradients + self.comm + self.rest


def moments(plan: UnitPlan, lasting: int | None = None) -> Iterator[tuple[MemoryEvent, MemoryEvent]]:
    """(the fullest moment while it is done, what there is after it) of each action at which bytes come or go, and of
    the optimizer. The fullest of all is `held_by_actions`'s peak.

    lasting: bytes of the step's inputs; None for those of `plan`.
    """
    rank = _Rank(plan, lasting)
    for place, action in enumerate(plan.pipeline.actions):
        rank.forget()
        rank.do(action)
        if rank.fullest:
            yield MemoryEvent(place, *rank.fullest), MemoryEvent(place, *rank.now)
    rank.forget()
    rank.end()
    assert rank.fullest
    yield MemoryEvent(len(plan.pipeline.actions), *rank.fullest), MemoryEvent(len(plan.pipeline.actions), *rank.now)


_ACCUMULATED, _STAGED, _WRITTEN = 1, 2, 4
"""Bytes of a unit's gradients, as the sum of: its accumulator, its full gradient on the way there, products of
an earlier micro-batch in either."""

_COMPUTE, _SEND, _RECEIVE = frozenset({"F", "I", "W", "B"}), ("SEND_F", "SEND_B"), ("RECV_F", "RECV_B")

_NONE, _OTHER = -1, -2
"""Which unit is being reduced: none, or one of another stage than an action's."""


class _Outcome(NamedTuple):
    """Changes by an action, and the gradients that it leaves."""

    effect: Effect
    there: tuple[int, ...]
    """Bytes of each unit of its stage."""
    reducing: int
    """The unit being reduced, by its place among those of the stage."""
    other: int
    """Gradients of the unit of another stage that was being reduced before."""


class _Rank:
    """Bytes of a rank between two of its actions, and the most so far."""

    def __init__(self, plan: UnitPlan, lasting: int | None = None) -> None:
        """lasting: bytes of the step's inputs; None for those of `plan`."""
        self.plan, self.sizes = plan, stages_of(plan)
        self.most = MemoryPeak()
        self.fullest: Change | None = None
        self.gradients = self.comm = self.stored = 0
        self.saved = self.sizes.lasting
        self.rest = self.sizes.inputs if lasting is None else lasting
        self.gradients_of = dict.fromkeys(plan.by_name, 0)
        self.reducing: Unit | None = None
        self.residency, self.uneven = Residency(plan), self.sizes.uneven
        self.lends = plan.backend == "shared"
        """Whether messages are read where they are, so that none is kept while it leaves."""
        self.leaving: dict[tuple[int, str], int] = {}
        """(peer, kind) -> bytes of the last message there, kept until the next one leaves, where another has to take
        it."""
        self.attending: Counter[int] = Counter()
        """Micro-batch -> its stages with attention between forward and backward: they share mask and tables."""
        self.names = {
            stage: tuple(unit.name for unit in units if not unit.frozen) for stage, units in stage_units(plan).items()
        }
        self.there = {stage: _values_of(names) for stage, names in self.names.items()}
        """Gradients of a stage's units, from those of all."""
        self.like = _like(plan)
        self.bytes_of: dict[int, Any] = {stage: self.sizes.of(stage) for stage in set(self.like.values())}
        self.outcomes: dict[Any, _Outcome] = {}
        self.beyond: dict[tuple[int, int], tuple[int, int, int]] = {}

        @cache
        def message(stage: int) -> int:
            """Bytes of what a stage hands on to the next one, and of its gradient."""
            elements, dtype = message_of(plan, stage)
            return elements * DTYPE_BYTES[dtype]

        self.message = message

    @property
    def now(self) -> Change:
        """Bytes between two actions."""
        return Change(self.gradients, self.comm, self.rest)

    def forget(self) -> None:
        """Have the most and the fullest be those of what follows."""
        self.most, self.fullest = MemoryPeak(), None

    def do(self, action: Action) -> None:
        kind, stage, micro, peer, parts = action
        if kind in _COMPUTE:
            if self.uneven:
                # An action that computes where micro-batches have exchanged different numbers of rows.
                saved, stored = self._routed(kind, stage, micro)
                self.saved += saved
                self.stored += stored
                self.rest += saved if kind == "F" else 0
                self._on_stage(kind, stage, self._moves(kind, stage, micro))
                self.rest += saved if kind != "F" else 0
            else:
                self._on_stage(kind, stage, self._moves(kind, stage, micro))
        elif kind in _RECEIVE:
            self.rest += self.message(stage - (kind == "RECV_F"))
        elif kind in _SEND:
            message = self.message(stage - (kind == "SEND_B"))
            self.rest -= message if self.lends else self.leaving.get((peer, kind), 0)
            if not self.lends:
                self.leaving[peer, kind] = message
        elif kind == "REDUCE_GRAD":
            self._on_stage(kind, stage, moves=False)
        elif kind == "UNSHARD":
            self.comm += self._whole(self.residency.gather(stage))
            self._note(self.gradients, self.comm, self.rest)
        elif kind == "RESHARD":
            self.comm -= self._whole(self.residency.free(stage))
        elif kind == "OVERLAP_F_B":
            for each in parts:
                self.do(each)
        elif kind == "SUM_TIED":
            self._on_stage("land", -1, moves=False)
            theirs = self.plan.by_name["tied"].shard_numel * DTYPE_BYTES[self.plan.dtypes.gradients]
            self._note(self.gradients, self.comm, self.rest + theirs)

    def end(self) -> MemoryPeak:
        self.rest -= sum(self.leaving.values())
        self._on_stage("land", -1, moves=False)
        self._note(self.gradients, self.comm, self.rest + optimizer(self.plan))
        self._note(0, self.comm, self.rest + outer_transient(self.plan))
        return self.most

    def _whole(self, units: list[Unit]) -> int:
        packed = sum(packed_bytes(self.plan, unit) * unit.shard_ranks for unit in units)
        return packed + sum(unit.padded * DTYPE_BYTES[self.plan.dtypes.gathered(unit)] for unit in units)

    def _moves(self, kind: str, stage: int, micro: int) -> bool:
        """Whether a micro-batch comes to the first, or leaves the last, of the stages with attention that it is under
        way on."""
        if kind not in ("F", "I", "B") or not self.bytes_of[self.like[stage]].attends:
            return False
        before = self.attending[micro]
        after = self.attending[micro] = before + (1 if kind == "F" else -1)
        return not (before and after)

    def _routed(self, kind: str, stage: int, micro: int) -> tuple[int, int]:
        """Bytes that an action saves, or lets go of, beyond those of `of`; on the device, and in the host's memory."""
        if (key := (stage, micro)) not in self.beyond:
            self.beyond[key] = self.sizes.beyond(stage, micro)
        saved, kept, stored = self.beyond[key]
        here = {"F": saved, "B": -saved, "I": kept - saved, "W": -kept}[kind]
        return here, {"F": stored, "W": 0}.get(kind, -stored)

    def _on_stage(self, kind: str, stage: int, moves: bool) -> None:
        """An action that computes, or that starts or ends a reduction."""
        names: tuple[str, ...] = ()
        there: tuple[int, ...] = ()
        if kind != "F" and stage in self.names:
            names, there = self.names[stage], self.there[stage](self.gradients_of)
        reducing = _NONE if self.reducing is None else self._under_way(names)
        key = kind, self.like.get(stage), moves, there, reducing
        outcome = self.outcomes.get(key)
        if outcome is None:
            outcome = self.outcomes[key] = self._follow(kind, stage, moves, names)
        self._apply(outcome.effect)
        if outcome.there != there:
            self.gradients_of.update(zip(names, outcome.there, strict=True))
        if outcome.reducing != _OTHER:
            if self.reducing and self.reducing.name not in names:
                self.gradients_of[self.reducing.name] = outcome.other
            self.reducing = None if outcome.reducing == _NONE else self.plan.by_name[names[outcome.reducing]]

    def _under_way(self, names: tuple[str, ...]) -> Any:
        """The reduction under way, as far as an action on a stage with these units depends on it."""
        unit = self.reducing
        assert unit
        if unit.name in names:
            return names.index(unit.name)
        return unit.padded, unit.shard_numel, self.gradients_of[unit.name]

    def _follow(self, kind: str, stage: int, moves: bool, names: tuple[str, ...]) -> _Outcome:
        """An action's outcome, from the first stage of the same sizes."""
        like = self.like.get(stage)
        units = [self.plan.by_name[name] for name in (self.names[like][: len(names)] if like is not None else ())]
        there = [self.gradients_of[name] for name in names]
        walk, other = MemoryTrace(self.plan), None
        if self.reducing and self.reducing.name in names:
            walk.flying = units[names.index(self.reducing.name)]
        elif self.reducing:
            walk.flying = other = replace(self.reducing, name="of another stage")
            units, there = [*units, other], [*there, self.gradients_of[self.reducing.name]]
        for unit, gradients in zip(units, there, strict=True):
            if gradients & _ACCUMULATED:
                walk.accumulate(unit)
            if gradients & _STAGED:
                walk.put(unit)
            if gradients & _WRITTEN:
                walk.written.add(unit.name)
        action = self.sizes.action(self.bytes_of.get(-1 if like is None else like), walk, moves)
        action.do(kind)
        after = [
            _ACCUMULATED * (unit.name in walk.accumulators)
            + _STAGED * (unit.name in walk.staged)
            + _WRITTEN * (unit.name in walk.written)
            for unit in units
        ]
        if walk.flying is None:
            reducing = _NONE
        else:
            reducing = _OTHER if walk.flying is other else units.index(walk.flying)
        return _Outcome(action.effect(), tuple(after[: len(names)]), reducing, after[-1] if other else 0)

    def _apply(self, effect: Effect) -> None:
        most_gradients, most_comm, fullest, after, saved, stored = effect
        gradients, comm, rest, most = self.gradients, self.comm, self.rest, self.most
        if fullest:
            self._note(gradients + fullest[0], comm + fullest[1], rest + fullest[2])
            if gradients + most_gradients > most.gradients:
                most.gradients = gradients + most_gradients
            if comm + most_comm > most.comm:
                most.comm = comm + most_comm
        self.gradients, self.comm, self.rest = gradients + after[0], comm + after[1], rest + after[2]
        self.saved += saved
        if self.saved > most.saved:
            most.saved = self.saved
        self.stored += stored
        if self.stored > most.stored:
            most.stored = self.stored

    def _note(self, gradients: int, comm: int, rest: int) -> None:
        most = self.most
        if gradients > most.gradients:
            most.gradients = gradients
        if comm > most.comm:
            most.comm = comm
        if gradients + comm + rest > most.peak:
            most.peak, self.fullest = gradients + comm + rest, Change(gradients, comm, rest)


class _CountingRank(_Rank):
    """A rank that also remembers which micro-batches were under way when saved activations were the most."""

    def __init__(self, plan: UnitPlan, lasting: int) -> None:
        super().__init__(plan, lasting)
        self.under_way: Counter[int] = Counter()
        self.kept: Counter[int] = Counter()
        self.best = UnderWay(Counter(), Counter(), 0)

    def do(self, action: Action) -> None:
        most = self.most.saved
        super().do(action)
        kind, stage = action[:2]
        if kind in ("F", "I", "B"):
            self.under_way[stage] += 1 if kind == "F" else -1
        if kind in ("I", "W"):
            self.kept[stage] += 1 if kind == "I" else -1
        if kind in _COMPUTE and self.most.saved > most:
            attending = sum(stages > 0 for stages in self.attending.values())
            self.best = UnderWay(self.under_way.copy(), self.kept.copy(), attending)


def _values_of(names: tuple[str, ...]) -> Callable[[dict[str, int]], tuple[int, ...]]:
    """The values of some keys of a dictionary."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda values: tuple(values[name] for name in names)


def stages_of(plan: UnitPlan) -> RankStages | TracedRankStages:
    """Bytes of a rank's stages."""
    if not (traced := trace_of(plan)):
        return RankStages(plan)
    from shardwise.predict.memory.traced_stages import TracedRankStages

    return TracedRankStages(plan, *traced)


def _like(plan: UnitPlan) -> dict[int, int]:
    """Stage -> the first of this rank's stages whose parts and units have the same sizes; of a traced module itself."""
    if trace_of(plan):
        return {stage: stage for stage in plan.stages}
    assert plan.pipeline.schedule is not None
    first: dict[Any, int] = {}
    found = {}
    for stage, units in stage_units(plan).items():
        parts = tuple((plan.blueprint.kind(part), plan.routing.memory_key(part)) for part in plan.stages[stage])
        sizes = tuple((unit.padded, unit.shard_numel) for unit in units)
        ends = stage == 0, stage + 1 == plan.pipeline.schedule.stages
        found[stage] = first.setdefault((ends, parts, sizes), stage)
    return found
