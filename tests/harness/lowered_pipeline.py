"""A pipeline as a `Program`, which `play` runs: an oracle for the one pass of `schedule/pipeline/flow.py`.

Message sizes stand for what is sent: 1 element for an activation or its gradient, 2 for the tied table, none for the
loss, so that a clock can tell what each takes.
"""

from harness.play import Compute
from shardwise.schedule.pipeline.action import COMPUTE, Action
from shardwise.schedule.pipeline.plan import PipelineSchedule
from shardwise.schedule.pipeline.times import Times
from shardwise.schedule.sending import Instruction as Primitive
from shardwise.schedule.sending import Program

ACTIVATION, TABLE, LOSS = ((0, 1),), ((0, 2),), ((0, 0),)
BESIDE = "collectives"
"""The stream of gathers and reductions."""


def lower(schedule: PipelineSchedule, times: Times | None = None) -> Program:
    """The program of all ranks. Each primitive's label is the action's text.

    A computation waits for the one before it, its message and its stage's gather; anything else for the computation
    before it alone, so that it is started at once and goes on beside the next ones.
    """
    times = times or Times.none(schedule.stages)
    return Program(tuple(_Lists(schedule, times, rank).write() for rank in range(schedule.ranks)), 2)


class _Lists:
    def __init__(self, schedule: PipelineSchedule, times: Times, rank: int) -> None:
        self.schedule, self.times, self.rank = schedule, times, rank
        self.out: list[Primitive] = []
        self.computed: tuple[int, ...] = ()
        self.received: dict[tuple[str, int, int], int] = {}
        self.gathered: dict[int, int] = {}
        self.reduced: dict[int, int] = {}

    def write(self) -> tuple[Primitive, ...]:
        for action in self.schedule.actions[self.rank]:
            self.add(action)
        return tuple(self.out)

    def emit(self, primitive: Primitive, *after: int) -> int:
        self.out.append(primitive._replace(after=(*self.computed, *after)))
        return len(self.out) - 1

    def add(self, action: Action) -> None:
        kind, stage, micro, peer, _ = action
        label = str(action)
        if kind in COMPUTE:
            needed = [index for part in action.leaves() for index in self.needs(part)]
            self.computed = (self.emit(Compute(self.times.of(action), label=label), *needed),)
        elif kind in ("RECV_F", "RECV_B"):
            self.received[kind, stage, micro] = self.emit(Primitive("recv", peer, ACTIVATION, label=label))
        elif kind in ("SEND_F", "SEND_B"):
            if not self.times.overlap:
                self.computed = (self.emit(Compute(self.times.hop, label=label)),)
            self.emit(Primitive("send", peer, ACTIVATION, label=label))
        elif kind == "UNSHARD":
            seconds = self.times.gather[stage]
            self.gathered[stage] = self.emit(Compute(seconds, label=label, stream=BESIDE))
        elif kind == "REDUCE_GRAD":
            seconds = self.times.reduce[stage]
            self.reduced[stage] = self.emit(Compute(seconds, label=label, stream=BESIDE))
        elif kind == "SUM_TIED":
            after = [self.reduced[stage]] if stage in self.reduced else []
            self.emit(Primitive("recv", peer, TABLE, label=label), *after)
            self.emit(Primitive("send", peer, TABLE, label=label), *after)
        elif kind == "SHARE_LOSS":
            self.share_loss(label)

    def needs(self, part: Action) -> list[int]:
        """The primitives that a computation waits for besides the computation before it."""
        arrives = {"F": "RECV_F", "I": "RECV_B", "B": "RECV_B"}.get(part.kind, "")
        message, gather = self.received.get((arrives, part.stage, part.micro)), self.gathered.get(part.stage)
        return [index for index in (message, gather) if index is not None]

    def share_loss(self, label: str) -> None:
        root = self.schedule.loss_rank
        if self.rank != root:
            self.emit(Primitive("recv", root, LOSS, label=label))
            return
        for other in range(self.schedule.ranks):
            if other != root:
                self.emit(Primitive("send", other, LOSS, label=label))
