"""Memory events of one pipeline action: bytes relative to those before it.

The effect of an action depends on the parts of its stage, on the gradients of these parts that are already there, and
on the reduction under way; not on anything else that the rank holds. So a rank needs it once for each such situation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from shardwise.layout.units import UnitPlan
from shardwise.predict.memory.activations import kept_items, saved_items, saved_mask, stored_bytes
from shardwise.predict.memory.buffers import MemoryByClass, MemoryTrace, When
from shardwise.predict.memory.peak import backwards, forward, inputs, loss, of_weights, saved_inputs, tables
from shardwise.predict.memory.sizes import Sizes
from shardwise.records import dataclass


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one micro-batch on one stage."""

    parts: list[str]
    saved: int
    """From its forward to its backward, on the device."""
    stored: int
    """Then in the host's memory."""
    kept: dict[str, int]
    """Part -> bytes from its backward to the gradients of its weights."""
    forward: int
    """The most in its forward, beyond what there is before."""
    known: int
    """Saved bytes that are inputs of the step."""
    unsaved: int
    """Its input, where no part saves it: its gradient's owner keeps it."""
    moments: Callable[[bool, bool], dict[tuple[When, str], int]]
    """(the gradients of weights come apart, they are added to others) -> `peak.backwards`."""
    attends: bool
    first: bool
    last: bool

    @classmethod
    def of(cls, plan: UnitPlan, s: Sizes, stage: int) -> StageBytes:
        assert plan.pipeline.schedule is not None
        parts = plan.stages[stage]
        return cls(
            parts,
            sum(sum(saved_items(plan, s, part).values()) for part in parts),
            sum(stored_bytes(plan, s, part) for part in parts),
            {part: sum(kept_items(plan, s, part).values()) for part in parts},
            forward(plan, s, parts),
            sum(saved_inputs(plan, s, part) for part in parts),
            s.stream * s.hidden * s.element * (stage > 0 and "input" not in saved_items(plan, s, parts[0])),
            cache(partial(backwards, plan, s, parts)),
            bool(plan.local.blocks(stage)),
            stage == 0,
            stage + 1 == plan.pipeline.schedule.stages,
        )


class Change(NamedTuple):
    """Bytes more than before an action."""

    gradients: int
    """Accumulators."""
    comm: int
    """Full gradients on their way, and buffers of their reduction."""
    rest: int
    """Activations and transients."""


class Effect(NamedTuple):
    """Bytes and buffers that one action changes."""

    gradients: int
    """Most accumulators at a time within the action."""
    comm: int
    """Most communication buffers at a time within the action."""
    fullest: Change | None
    """Its fullest moment; None where no bytes come."""
    after: Change
    saved: int
    """Saved activations after it."""
    stored: int
    """Those in the host's memory."""


class FollowedAction(ABC):
    """Follows one action on a stage; `effect` gives the result. What computes is a subclass's."""

    def __init__(self, of: Any, walk: MemoryTrace) -> None:
        """of: the stage; None for an action on no stage. walk: the buffers that the action can change, followed on."""
        self.walk, self.parts = walk, of.parts if of else []
        if of:
            self.of = of
        self.before = walk.now("loss")
        self.gradients = self.comm = self.rest = self.saved = self.stored = 0
        self.fullest: Change | None = None

    def do(self, kind: str) -> None:
        if kind == "F":
            self.forward()
        elif kind in ("I", "B"):
            self.backward(apart=kind == "I")
        elif kind == "W":
            self.weights()
        elif kind == "REDUCE_GRAD":
            self.reduce()
        else:
            self.land()

    @abstractmethod
    def forward(self) -> None:
        """A forward pass."""

    @abstractmethod
    def backward(self, apart: bool) -> None:
        """A backward pass. apart: without the gradients of weights."""

    @abstractmethod
    def weights(self) -> None:
        """The gradients of weights that were left for later."""

    def effect(self) -> Effect:
        return Effect(self.gradients, self.comm, self.fullest, self._change(self.walk.now("loss"), self.rest),
                      self.saved, self.stored)  # fmt: skip

    def _change(self, held: MemoryByClass, rest: int) -> Change:
        return Change(held.gradients - self.before.gradients, held.comm - self.before.comm, held.arriving + rest)

    def note(self, held: MemoryByClass, rest: int) -> None:
        change = self._change(held, rest)
        self.gradients, self.comm = max(self.gradients, change.gradients), max(self.comm, change.comm)
        if self.fullest is None or sum(change) > sum(self.fullest):
            self.fullest = change

    def moment(self) -> None:
        """A computation has ended."""
        self.note(self.walk.now("loss"), self.rest)

    def reduce(self) -> None:
        for part in reversed(self.parts):
            for held in self.walk.reduce(part):
                self.note(held, 0)

    def land(self) -> None:
        """The reduction under way ends."""
        for held in self.walk.land("optimizer"):
            self.note(held, 0)


class ActionMemory(FollowedAction):
    """An action of a model with a configuration."""

    of: StageBytes

    def __init__(
        self, plan: UnitPlan, s: Sizes, of: StageBytes | None, walk: MemoryTrace, moves: bool, masks: tuple[int, int]
    ) -> None:
        """moves: whether its micro-batch is on no other stage of the rank, so that its masks and tables come or go.
        masks: bytes of a micro-batch's saved masks, and of its tables."""
        super().__init__(of, walk)
        self.plan, self.s = plan, s
        self.message = s.stream * s.hidden * s.element
        self.mask, shared = masks if moves else (0, 0)
        self.shared = self.mask + shared
        # The gradient that a message brings is one that linear maps keep, unless it is gathered or dropped out first.
        self.keeps_messages = not (plan.layout.sp or plan.model.dropout)
        self.masks = masks[0]

    def forward(self) -> None:
        of = self.of
        now = self.walk.now("loss")
        self.note(now, self.shared + of.forward)
        self.saved, self.stored = of.saved + self.mask, of.stored
        # Its input, now among the saved tensors, came by a message or from a stage of this rank.
        self.rest = of.saved + of.unsaved - of.known + self.shared + ((not of.last) - (not of.first)) * self.message
        self.note(now, self.rest + (loss(self.plan, self.s) if of.last else 0))
        self.moment()

    def backward(self, apart: bool) -> None:
        of = self.of
        kept = 0
        if of.last:
            self.note(self.walk.now("loss"), loss(self.plan, self.s))
        own = self.masks if of.attends else 0  # counted in the moments and in what is there beside
        for part in reversed(of.parts):
            # The first one's output gradient is the message, which stays until the stage's backward is over.
            twice = self.message if part == of.parts[-1] and not of.last else 0
            beside = kept - of.saved - own - twice
            begins = tuple(self.walk.begin(part))
            # The head's gradients never come apart.
            both = not apart or self.plan.blueprint.kind(part) == "head"
            moments = of.moments(apart, both and self.walk.write(part))
            for held in (*begins, self.walk.now("backward", part)):
                self.note(held, beside + moments[held.when, part])
            if apart:
                kept += of.kept[part] - (twice if self.keeps_messages else 0)
                continue
            for held in self.walk.collect(part):
                self.note(held, beside + moments["reduction", part])
        if apart and not of.last and self.keeps_messages:
            kept += self.message
        self.saved, self.stored = kept - of.saved - self.mask, -of.stored
        self.rest = (
            kept - of.saved - of.unsaved + of.known - self.shared + ((not of.first) - (not of.last)) * self.message
        )
        self.moment()

    def weights(self) -> None:
        for part in reversed(self.of.parts):
            begins = tuple(self.walk.begin(part))
            beside = of_weights(self.plan, self.s, part, part != "head" and self.walk.write(part))
            for held in (*begins, self.walk.now("backward", part), *self.walk.collect(part)):
                self.note(held, beside)
        self.rest = self.saved = -sum(self.of.kept.values())
        self.moment()


class RankStages:
    """Bytes of the stages of one rank, and of the messages between them, of a model with a configuration."""

    def __init__(self, plan: UnitPlan) -> None:
        self.plan, self.s = plan, Sizes.of(plan)
        self.masks = saved_mask(plan, self.s), tables(plan, self.s)

    @property
    def inputs(self) -> int:
        """Bytes of the step's inputs."""
        return inputs(self.plan, self.s)

    @property
    def lasting(self) -> int:
        """Saved bytes that are there once, however many micro-batches are under way."""
        return 0

    @property
    def uneven(self) -> bool:
        """Whether micro-batches save other bytes than those of `of`."""
        return self.plan.routing.uneven

    def beyond(self, stage: int, micro: int) -> tuple[int, int, int]:
        """Bytes that a micro-batch saves on a stage, that are kept of it for the gradients of weights, and that it
        saves in the host's memory, beyond those of `of`, which has the most rows of experts."""
        s, plan, this, parts = self.s, self.plan, self.plan.as_micro_batch(micro), self.plan.stages[stage]
        saved, kept = (
            sum(sum(items(this, s, part).values()) - sum(items(plan, s, part).values()) for part in parts)
            for items in (saved_items, kept_items)
        )
        return saved, kept, sum(stored_bytes(this, s, part) - stored_bytes(plan, s, part) for part in parts)

    def of(self, stage: int) -> StageBytes:
        """Bytes of a micro-batch on a stage."""
        return StageBytes.of(self.plan, self.s, stage)

    def action(self, of: StageBytes | None, walk: MemoryTrace, moves: bool) -> FollowedAction:
        """As of `ActionMemory`."""
        return ActionMemory(self.plan, self.s, of, walk, moves, self.masks)
