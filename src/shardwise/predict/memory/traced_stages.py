"""Memory of a traced module's stages, from what was recorded of its parts in a row.

In the recorded stage all parts are there. Of a real one's moments those tensors are taken away that other parts alone
keep; the message that it takes or hands on is added where it stays longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.layout.units import UnitPlan
from shardwise.model.trace import Trace, TracedStep
from shardwise.model.traced_stages import TracedTensors, When
from shardwise.predict.memory.buffers import MemoryTrace
from shardwise.predict.memory.pipeline_action import FollowedAction
from shardwise.predict.traffic.messages import message_of
from shardwise.report.step_report import DTYPE_BYTES

BACKWARD: tuple[When, ...] = ("backward", "adding", "inputs")
"""Kinds of backward passes."""


@dataclass(frozen=True)
class TracedStageBytes:
    """Bytes of one micro-batch on one stage."""

    parts: list[str]
    saved: int
    """From its forward to its backward, inputs of the step included."""
    kept: int
    """From there to the gradients of its weights, where these come apart."""
    held: int
    """From forward to backward, its saved tensors and arguments for recomputation, without inputs of the step."""
    held_for_weights: int
    """Of `kept`, without inputs of the step."""
    unsaved: int
    """Its input, where nothing else keeps it."""
    message_in: int
    message_out: int
    """0 at the ends of the pipeline."""
    forward: int
    """The most in its forward, beyond what there is before."""
    moments: dict[tuple[When, str], int]
    """(backward, adding, inputs or weights; part) -> the most in it, beyond what there is before its backward pass, or
    before its gradients of weights."""
    attends: bool = False
    """Masks are each stage's own."""


class TracedRankStages:
    """As of `RankStages`, of a traced module."""

    def __init__(self, plan: UnitPlan, trace: Trace, step: TracedStep) -> None:
        assert step.stages is not None
        self.plan, self.trace, self.step, self.stages = plan, trace, step, step.stages
        names = plan.blueprint.names
        self.order = {name: place for place, name in enumerate(names)}
        self.names = names
        self.peaks = {(peak.when, peak.part): self._at(peak.nbytes) for peak in step.stages.peaks}
        self.handed = {message.part: message for message in step.stages.messages}

    def _at(self, pair: tuple[int, int]) -> int:
        return self.trace.at(pair, self.plan.layout.micro)

    @property
    def inputs(self) -> int:
        """Bytes of the step's inputs, and of the module's buffers."""
        return self.plan.micro_batches * self._at(self.step.inputs) + self._at(self.stages.buffers)

    @property
    def lasting(self) -> int:
        """Bytes of the module's buffers that backward passes read."""
        return self._bytes(lambda t: t.kind == "lasting" and self._any(t.savers, set(self.plan.parts)))

    def message(self, stage: int) -> int:
        """As of `RankStages`."""
        elements, dtype = message_of(self.plan, stage)
        return elements * DTYPE_BYTES[dtype]

    def action(self, of: TracedStageBytes | None, walk: MemoryTrace, moves: bool) -> FollowedAction:
        """As of `TracedAction`."""
        return TracedAction(of, walk)

    def of(self, stage: int) -> TracedStageBytes:
        """Bytes of a micro-batch on a stage."""
        assert self.plan.schedule is not None
        parts = self.plan.stages[stage]
        mine, first, last = set(parts), stage == 0, stage + 1 == self.plan.schedule.stages
        message_in, message_out = 0 if first else self.message(stage - 1), 0 if last else self.message(stage)
        held = self._bytes(lambda t: t.kind == "activation" and self._any((*t.savers, *t.holders), mine))
        before = self.names[self.order[parts[0]] - 1]
        return TracedStageBytes(
            parts,
            saved=self._bytes(lambda t: t.kind != "lasting" and self._any(t.savers, mine)),
            kept=self._bytes(lambda t: t.kind != "lasting" and self._any(t.keepers, mine)),
            held=held,
            held_for_weights=self._bytes(lambda t: t.kind == "activation" and self._any(t.keepers, mine)),
            unsaved=0 if first or self.handed[before].kept else message_in,
            message_in=message_in,
            message_out=message_out,
            forward=self._forward(parts, first),
            moments={
                (when, part): self._moment(when, part, parts) - held - message_out * (part == parts[-1])
                for when in BACKWARD
                for part in parts
            }
            | {("weights", part): self.peaks.get(("weights", part), 0) for part in parts},
        )

    def _bytes(self, counts: Callable[[TracedTensors], bool]) -> int:
        return sum(self._at(tensors.nbytes) for tensors in self.stages.tensors if counts(tensors))

    @staticmethod
    def _any(names: tuple[str, ...], of: set[str]) -> bool:
        return not of.isdisjoint(names)

    def _forward(self, parts: list[str], first: bool) -> int:
        """The most in a stage's forward pass. What is made before the blocks, such as masks, every stage makes."""
        most = max(self.peaks["forward", part] for part in parts)
        if first:
            return most
        entry = self.names[0]
        message = self.handed[entry]
        made = self.peaks["made", entry] - self._at(message.elements) * DTYPE_BYTES[message.dtype]
        made -= self._bytes(lambda t: t.kind == "activation" and entry in t.savers)
        return max(0, made) + most - self.peaks["made", self.names[self.order[parts[0]] - 1]]

    def _moment(self, when: When, part: str, parts: list[str]) -> int:
        """The most while a part goes backward, without what only parts of other stages keep."""
        place = self.order[part]
        mine = set(parts)
        behind = {name for name in parts if self.order[name] <= place}
        earlier = set(self.names[: place + 1])
        later, ahead = set(self.names[place:]), {name for name in mine if self.order[name] >= place}

        def elsewhere(t: TracedTensors) -> bool:
            if t.kind != "activation":
                return False
            keeps, apart = (*t.savers, *t.holders), when == "inputs"
            there = self._any(keeps, earlier) or (apart and self._any(t.keepers, later))
            return there and not (self._any(keeps, behind) or (apart and self._any(t.keepers, ahead)))

        return self.peaks.get((when, part), 0) - self._bytes(elsewhere)


class TracedAction(FollowedAction):
    """An action of a traced module, whose stages go backward as a whole."""

    def __init__(self, of: TracedStageBytes | None, walk: MemoryTrace) -> None:
        super().__init__(walk, of.parts if of else [])
        if of:
            self.of = of

    def forward(self) -> None:
        of = self.of
        self.note(self.walk.now("loss"), of.forward)
        self.saved = of.saved
        self.rest = of.held + of.unsaved + of.message_out - of.message_in
        self.moment()

    def backward(self, apart: bool) -> None:
        of = self.of
        for part in reversed(of.parts):
            for held in self.walk.begin(part):
                self.note(held, 0)
        adds = {part: self.walk.write(part) for part in reversed(of.parts)}
        when: dict[str, When] = {
            part: "inputs" if apart else "adding" if adds[part] else "backward" for part in of.parts
        }
        self.note(self.walk.now("backward"), max(of.moments[when[part], part] for part in of.parts))
        left = of.message_in - of.held - of.unsaved + of.held_for_weights * apart
        for part in reversed(of.parts) if not apart else ():
            for held in self.walk.collect(part):
                self.note(held, left)
        self.saved = of.kept * apart - of.saved
        self.rest = left - of.message_out
        self.moment()

    def weights(self) -> None:
        of = self.of
        for part in reversed(of.parts):
            begins = tuple(self.walk.begin(part))
            self.walk.write(part)
            for held in (*begins, self.walk.now("backward", part)):
                self.note(held, of.moments["weights", part])
            for held in self.walk.collect(part):
                self.note(held, 0)
        self.saved, self.rest = -of.kept, -of.held_for_weights
        self.moment()
