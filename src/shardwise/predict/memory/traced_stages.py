"""Memory of a traced module's stages, from what was recorded of its parts in a row.

In the recorded stage all parts are there. Of a real one's moments those tensors are taken away that other parts alone
keep; the message that it takes or hands on is added where it stays longer.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.layout.units import UnitPlan
from shardwise.model.trace import Trace, TracedStep
from shardwise.model.traced_stages import TracedStages, TracedTensors, When
from shardwise.predict.memory.buffers import MemoryTrace
from shardwise.predict.memory.pipeline_action import FollowedAction
from shardwise.predict.memory.traced import more_received
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


class RecordedParts:
    """The recorded parts at one size of micro-batch, and the stages cut from them; each cut once."""

    def __init__(self, trace: Trace, stages: TracedStages, names: list[str], micro: int) -> None:
        """names: of the parts, in order. micro: rows."""
        self.tensors = [(tensors, trace.at(tensors.nbytes, micro)) for tensors in stages.tensors]
        self.names, self.order = names, {name: place for place, name in enumerate(names)}
        self.peaks = {(peak.when, peak.part): trace.at(peak.nbytes, micro) for peak in stages.peaks}
        self.kept = {message.part: message.kept for message in stages.messages}
        self.messages = {
            message.part: trace.at(message.elements, micro) * DTYPE_BYTES[message.dtype] for message in stages.messages
        }
        """Part -> bytes of what it hands on."""
        self._stages: dict[tuple[str, ...], TracedStageBytes] = {}

    def bytes(self, counts: Callable[[TracedTensors], bool]) -> int:
        """Bytes of some of the tensors."""
        return sum(nbytes for tensors, nbytes in self.tensors if counts(tensors))

    def stage(self, parts: tuple[str, ...]) -> TracedStageBytes:
        """Bytes of the stage with these parts."""
        if parts not in self._stages:
            self._stages[parts] = self._cut(parts)
        return self._stages[parts]

    def _cut(self, parts: tuple[str, ...]) -> TracedStageBytes:
        mine, before = set(parts), self.order[parts[0]] - 1
        message_in = self.messages[self.names[before]] if before >= 0 else 0
        message_out = 0 if parts[-1] == self.names[-1] else self.messages[parts[-1]]
        held = self.bytes(lambda t: t.kind == "activation" and _any((*t.savers, *t.holders), mine))
        moments = {
            (when, part): self._moment(when, part, parts) - held - message_out * (part == parts[-1])
            for when in BACKWARD
            for part in parts
        }
        return TracedStageBytes(
            list(parts),
            saved=self.bytes(lambda t: t.kind != "lasting" and _any(t.savers, mine)),
            kept=self.bytes(lambda t: t.kind != "lasting" and _any(t.keepers, mine)),
            held=held,
            held_for_weights=self.bytes(lambda t: t.kind == "activation" and _any(t.keepers, mine)),
            unsaved=0 if before < 0 or self.kept[self.names[before]] else message_in,
            message_in=message_in,
            message_out=message_out,
            forward=self._forward(parts),
            moments=moments | {("weights", part): self.peaks.get(("weights", part), 0) for part in parts},
        )

    def _forward(self, parts: tuple[str, ...]) -> int:
        """The most in a stage's forward pass. What is made before the blocks, such as masks, every stage makes."""
        most, entry = max(self.peaks["forward", part] for part in parts), self.names[0]
        if parts[0] == entry:
            return most
        own = self.bytes(lambda t: t.kind == "activation" and entry in t.savers)
        made = self.peaks["made", entry] - self.messages[entry] - own
        return max(0, made) + most - self.peaks["made", self.names[self.order[parts[0]] - 1]]

    def _moment(self, when: When, part: str, parts: tuple[str, ...]) -> int:
        """The most while a part goes backward, without what only parts of other stages keep."""
        place = self.order[part]
        earlier, later = set(self.names[: place + 1]), set(self.names[place:])
        behind, ahead = earlier & set(parts), later & set(parts)
        apart = when == "inputs"

        def elsewhere(t: TracedTensors) -> bool:
            if t.kind != "activation":
                return False
            keeps = (*t.savers, *t.holders)
            there = _any(keeps, earlier) or (apart and _any(t.keepers, later))
            return there and not (_any(keeps, behind) or (apart and _any(t.keepers, ahead)))

        return self.peaks.get((when, part), 0) - self.bytes(elsewhere)


def _any(names: tuple[str, ...], of: set[str]) -> bool:
    return not of.isdisjoint(names)


class TracedRankStages:
    """As of `RankStages`, of a traced module."""

    def __init__(self, plan: UnitPlan, trace: Trace, step: TracedStep) -> None:
        assert step.stages is not None
        self.plan, micro, stages = plan, plan.layout.micro, step.stages
        self.received = {part: trace.at(nbytes, micro) for part, nbytes in step.received}
        """Part -> bytes of rows that its experts receive, in equal parts."""
        self.uneven = plan.routed is not None and bool(self.received)
        self.inputs = plan.micro_batches * trace.at(step.inputs, micro) + trace.at(stages.buffers, micro)
        """Bytes of the step's inputs, and of the module's buffers."""
        if micro not in stages.recorded:
            stages.recorded[micro] = RecordedParts(trace, stages, plan.blueprint.names, micro)
        self.recorded: RecordedParts = stages.recorded[micro]

    @property
    def lasting(self) -> int:
        """Bytes of the module's buffers that backward passes read."""
        return self.recorded.bytes(lambda t: t.kind == "lasting" and _any(t.savers, set(self.plan.parts)))

    def beyond(self, stage: int, micro: int) -> tuple[int, int, int]:
        """As of `RankStages`; gradients of experts' weights come with those of their inputs."""
        held = [(part, self.received.get(part, 0)) for part in self.plan.stages[stage]]
        return sum(more_received(self.plan, equal, part, micro) for part, equal in held), 0, 0

    def of(self, stage: int) -> TracedStageBytes:
        """Bytes of a micro-batch on a stage."""
        return self.recorded.stage(tuple(self.plan.stages[stage]))

    def action(self, of: TracedStageBytes | None, walk: MemoryTrace, moves: bool) -> FollowedAction:
        """As of `TracedAction`."""
        return TracedAction(of, walk)


class TracedAction(FollowedAction):
    """An action of a traced module, whose stages go backward as a whole."""

    of: TracedStageBytes

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
