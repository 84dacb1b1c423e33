"""What a rank of a pipeline holds, one action of its list after the other, in bytes.

The list says which micro-batches are between their forward and their backward, which messages lie ready, which stages
are gathered and which gradients are on their way; what each takes is `activations`, `buffers` and `peak`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.layout.units import UnitPlan
from shardwise.predict.activations import Sizes, kept_items, saved_items, saved_mask
from shardwise.predict.buffers import Held, State, Walk, When
from shardwise.predict.peak import (
    backwards,
    embedding_forward,
    inputs,
    loss,
    of_weights,
    optimizer,
    saved_inputs,
    stream_dropout,
    tables,
)
from shardwise.report.step_report import DTYPE_BYTES

if TYPE_CHECKING:
    from shardwise.schedule.pipeline import Action


@dataclass
class Most:
    """The most bytes at one time within a step: of each class, and of all that does not last through it."""

    saved: int = 0
    gradients: int = 0
    comm: int = 0
    peak: int = 0

    @property
    def bytes(self) -> tuple[int, int, int, int]:
        """In the order of the fields."""
        return self.saved, self.gradients, self.comm, self.peak

    def include(self, other: Most) -> None:
        """Count another part of the step, too."""
        self.saved, self.gradients, self.comm, self.peak = map(max, zip(self.bytes, other.bytes, strict=True))


@dataclass(frozen=True)
class _Stage:
    """Bytes of one micro-batch on one stage.

    saved: from its forward to its backward. kept: part -> from there to the gradients of weights. known: what of
    `saved` are inputs of the step. moments: as `peak.backwards` has them, with the gradients of weights or apart.
    """

    parts: list[str]
    saved: int
    kept: dict[str, int]
    known: int
    moments: dict[bool, dict[tuple[When, str], int]]
    attends: bool

    @classmethod
    def of(cls, plan: UnitPlan, s: Sizes, stage: int) -> _Stage:
        parts = plan.stages[stage]
        return cls(
            parts,
            sum(sum(saved_items(plan, s, part).values()) for part in parts),
            {part: sum(kept_items(plan, s, part).values()) for part in parts},
            sum(saved_inputs(plan, s, part) for part in parts),
            {apart: backwards(plan, s, parts, apart) for apart in (False, True)},
            bool(plan.blocks(stage)),
        )


def held_by_actions(plan: UnitPlan) -> Most:
    """Follow the actions of `plan`'s rank through one step, those of its steady state once."""
    assert plan.steady is not None
    if plan.steady.grows and plan.steady.repeats:
        return _continued(plan)
    rank = _Rank(plan.short, inputs(plan, Sizes.of(plan)))
    # A shortened list has little that repeats: to look for it takes longer than to do it again.
    step = rank.do if plan.steady.repeats else rank.follow
    for action in rank.plan.actions:
        step(action)
    return rank.end()


def _continued(plan: UnitPlan) -> Most:
    """The same where a rank holds more the more micro-batches there are: by as much at every further period, which two
    short steps show for each action."""
    from shardwise.schedule.pipeline.steady import continuation

    assert plan.steady is not None
    lasting, short = inputs(plan, Sizes.of(plan)), plan.short
    longer = short.of_micro_batches(short.micro_batches + plan.steady.period)
    a, b = _by_action(short, lasting), _by_action(longer, lasting)
    most = Most()
    for one, place in zip(a, [*continuation(short.actions, longer.actions), -1], strict=True):
        both = zip(one.bytes, b[place].bytes, strict=True)
        most.include(Most(*(x + plan.steady.repeats * (y - x) for x, y in both)))
    return most


def _by_action(plan: UnitPlan, lasting: int) -> list[Most]:
    """The most while each action is done, and in the end."""
    rank, found = _Rank(plan, lasting), []
    for action in plan.actions:
        rank.most = Most()
        rank.do(action)
        found.append(rank.most)
    rank.most = Most()
    return [*found, rank.end()]


class Moment(NamedTuple):
    """Bytes at one moment of a step, of what does not last through it. place: of the action in the rank's list, whose
    length stands for the optimizer. gradients, comm: of the engine; rest: activations and all that is transient."""

    place: int
    gradients: int
    comm: int
    rest: int

    @property
    def total(self) -> int:
        return self.gradients + self.comm + self.rest


def moments(plan: UnitPlan) -> Iterator[tuple[Moment, Moment]]:
    """(the fullest moment while it is done, what there is after it) of each action at which bytes come or go, and of
    the optimizer. The fullest of all is `held_by_actions`'s peak."""
    rank = _Watched(plan)
    for place, action in enumerate(plan.actions):
        rank.fullest = None
        rank.do(action)
        if rank.fullest:
            yield rank.moment_of(place, *rank.fullest), rank.moment_of(place, rank.walk.now("loss"), rank.activations)
    rank.fullest = None
    rank.end()
    assert rank.fullest
    last = len(plan.actions)
    yield (
        rank.moment_of(last, *rank.fullest),
        rank.moment_of(last, rank.walk.now("optimizer"), rank.activations),
    )


class _Rank:
    """lasting: bytes of the step's inputs; None for those of `plan`."""

    def __init__(self, plan: UnitPlan, lasting: int | None = None) -> None:
        assert plan.schedule is not None
        self.plan, self.schedule, self.s = plan, plan.schedule, Sizes.of(plan)
        self.walk, self.most = Walk(plan), Most()
        self.message = self.s.stream * self.s.hidden * self.s.element
        self.stages = {stage: _Stage.of(plan, self.s, stage) for stage in plan.stages}
        self.mask, self.tables = saved_mask(plan, self.s), tables(plan, self.s)
        self.lasting = inputs(plan, self.s) if lasting is None else lasting
        self.saved = self.kept = self.known = self.messages = 0
        # The gradient that a message brings is one that linear maps keep, unless it is gathered or dropped out first.
        self.keeps_messages = not (plan.layout.sp or plan.model.dropout)
        self.seen: dict[Any, tuple[int, int, int, int, int, State]] = {}
        self.leaving: set[tuple[int, str]] = set()
        """(peer, kind): the last message there is kept until the next one leaves, where another has to take it."""
        self.attending: Counter[int] = Counter()
        """Micro-batch -> its stages with attention between forward and backward: they share mask and tables."""

    @property
    def activations(self) -> int:
        """All that is there between two actions, but for the engine's buffers."""
        shared = len(self.attending) * (self.mask + self.tables)
        return self.lasting + self.saved + self.kept - self.known + shared + self.messages * self.message

    def note(self, held: Held, beside: int) -> None:
        most = self.most
        most.gradients = max(most.gradients, held.gradients)
        most.comm = max(most.comm, held.comm)
        most.peak = max(most.peak, held.total + beside)

    def moment(self) -> None:
        """A computation has ended."""
        self.most.saved = max(self.most.saved, self.saved + self.kept + len(self.attending) * self.mask)
        self.note(self.walk.now("loss"), self.activations)

    def follow(self, action: Action) -> None:
        """Do an action; one that finds all as it was at an earlier one of its kind, as in the steady part of a
        schedule, leaves all as that one did."""
        if action.kind not in ("F", "I", "W", "B", "OVERLAP_F_B", "REDUCE_GRAD"):
            self.do(action)
            return
        key = tuple((part.kind, part.stage, self.attending[part.micro]) for part in action.leaves()), self.state()
        if key not in self.seen:
            self.do(action)
            self.seen[key] = self.state()
            return
        self.saved, self.kept, self.known, self.messages, _, buffers = self.seen[key]
        self.walk.restore(buffers)
        for part in action.leaves():
            if part.kind in ("F", "I", "B"):
                self.attend(part.stage, part.micro, 1 if part.kind == "F" else -1)

    def state(self) -> tuple[int, int, int, int, int, State]:
        """All that a computation's bytes depend on, but for which micro-batches are under way."""
        return self.saved, self.kept, self.known, self.messages, len(self.attending), self.walk.state()

    def attend(self, stage: int, micro: int, by: int) -> None:
        """A micro-batch has begun or ended on a stage."""
        if self.stages[stage].attends:
            self.attending[micro] += by
            if not self.attending[micro]:
                del self.attending[micro]

    def do(self, action: Action) -> None:
        kind, stage, micro, peer, parts = action
        if kind == "F":
            self.forward(stage, micro)
        elif kind in ("I", "B"):
            self.backward(stage, micro, apart=kind == "I")
        elif kind == "W":
            self.weights(stage)
        elif kind == "OVERLAP_F_B":
            for each in parts:
                self.do(each)
        elif kind in ("RECV_F", "RECV_B"):
            self.messages += 1
        elif kind in ("SEND_F", "SEND_B"):
            if self.plan.backend == "shared" or (peer, kind) in self.leaving:
                self.messages -= 1
            else:
                self.leaving.add((peer, kind))
        elif kind == "UNSHARD":
            self.walk.gather(stage)
            self.note(self.walk.now("loss"), self.activations)
        elif kind == "RESHARD":
            self.walk.free(stage)
        elif kind == "REDUCE_GRAD":
            for part in reversed(self.stages[stage].parts):
                for held in self.walk.reduce(part):
                    self.note(held, self.activations)
        elif kind == "SUM_TIED":
            self.land()
            theirs = self.plan.by_name["tied"].shard_numel * DTYPE_BYTES[self.plan.grad_dtype]
            self.note(self.walk.now("optimizer"), self.activations + theirs)

    def forward(self, stage: int, micro: int) -> None:
        of, last = self.stages[stage], stage + 1 == self.schedule.stages
        self.saved += of.saved
        self.known += of.known
        self.attend(stage, micro, 1)
        # Its input, now among the saved tensors, came by a message or from a stage of this rank.
        self.messages += (not last) - (stage > 0)
        self.note(self.walk.now("loss"), self.activations + (loss(self.s) if last else 0))
        if of.attends:
            self.note(self.walk.now("loss"), self.activations + stream_dropout(self.plan, self.s))
        elif stage == 0:
            self.note(self.walk.now("loss"), self.activations - self.message + embedding_forward(self.plan, self.s))
        self.moment()

    def backward(self, stage: int, micro: int, apart: bool) -> None:
        of, last = self.stages[stage], stage + 1 == self.schedule.stages
        moments = of.moments[apart]
        if last:
            self.note(self.walk.now("loss"), self.activations + loss(self.s))
        self.saved -= of.saved
        self.known -= of.known
        own = self.mask if of.attends else 0  # counted in the moments and in what is there beside
        for part in reversed(of.parts):
            # The first one's output gradient is the message, which stays until the stage's backward is over.
            twice = self.message if part == of.parts[-1] and not last else 0
            beside = self.activations - of.known - own - twice
            for held in (*self.walk.begin(part), self.walk.now("backward", part)):
                self.note(held, beside + moments[held.when, part])
            if apart:
                self.kept += of.kept[part] - (twice if self.keeps_messages else 0)
                continue
            for held in self.walk.collect(part):
                self.note(held, beside + moments["reduction", part])
        self.attend(stage, micro, -1)
        self.messages += (stage > 0) - (not last)
        if apart and not last and self.keeps_messages:
            self.kept += self.message
        self.moment()

    def weights(self, stage: int) -> None:
        of = self.stages[stage]
        for part in reversed(of.parts):
            for held in (*self.walk.begin(part), self.walk.now("backward", part), *self.walk.collect(part)):
                self.note(held, self.activations + of_weights(self.plan, self.s, part))
        self.kept -= sum(of.kept.values())
        self.moment()

    def land(self) -> None:
        for held in self.walk.land("optimizer"):
            self.note(held, self.activations)

    def end(self) -> Most:
        self.messages -= len(self.leaving)
        self.land()
        self.note(self.walk.now("optimizer"), self.activations + optimizer(self.plan))
        return self.most


class _Watched(_Rank):
    """A rank whose fullest moment since the last look is known."""

    fullest: tuple[Held, int] | None = None

    def note(self, held: Held, beside: int) -> None:
        super().note(held, beside)
        if self.fullest is None or held.total + beside > self.fullest[0].total + self.fullest[1]:
            self.fullest = held, beside

    @staticmethod
    def moment_of(place: int, held: Held, beside: int) -> Moment:
        return Moment(place, held.gradients, held.comm, held.arriving + beside)
