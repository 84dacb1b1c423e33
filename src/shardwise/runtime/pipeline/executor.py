"""The executor of pipeline schedules: it takes its rank's actions one by one, and decides nothing.

`execute` does what `schedule/pipeline/action.py` says of each kind: it posts, sends and hands over what stages make,
and asks a `Worker` to compute, gather and reduce.
"""

from typing import Protocol

import torch
from torch import Tensor

from shardwise.layout import pipeline
from shardwise.layout.axes import PP
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.protocol import Work
from shardwise.schedule.pipeline import Action, PipelineSchedule


class Worker(Protocol):
    """Computation of one rank's stages, and the collectives besides the messages."""

    def buffer(self, way: str, stage: int, micro: int) -> Tensor:
        """Memory for the message of one micro-batch that a stage takes: "F", its input, or "B", the gradient of its
        output."""

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        """From the output of the stage before to one's own; the last stage keeps its loss and gives None."""

    def backward(self, stage: int, micro: int, grad: Tensor | None, weights: bool) -> Tensor | None:
        """From the gradient of the output (None: of the loss) to that of the input, which the first stage has none of;
        with the gradients of weights, or keeping what these need."""

    def backward_of_weights(self, stage: int, micro: int) -> None:
        """Weight gradients that `backward` has deferred."""

    def unshard(self, stage: int) -> None: ...
    def reshard(self, stage: int) -> None: ...
    def reduce(self, stage: int) -> None: ...
    def tied_gradients(self) -> Tensor:
        """This end's gradients of the tied table, reduced over the data ranks: the other end's are added to them."""

    def share_loss(self, holder: int) -> None:
        """holder: the place in the pipeline of the rank that has the loss."""


Key = tuple[str, int, int]
"""("F" or "B", stage, micro-batch): what the stage is about to take, or what it has made."""


class _Execution:
    def __init__(self, schedule: PipelineSchedule, comms: Comms, worker: Worker) -> None:
        self.schedule, self.comms, self.worker = schedule, comms, worker
        self.arriving: dict[Key, tuple[Tensor, Work]] = {}
        self.made: dict[Key, Tensor] = {}
        self.leaving: dict[tuple[int, str], tuple[Tensor, Work]] = {}
        """(peer, way) -> the last message; a send waits for the one before it. That is less than the schedule is
        verified for, which is that every send waits for its own receive."""

    def run(self, rank: int) -> None:
        actions = self.schedule.actions[rank]
        for action, phase in zip(actions, pipeline.phases(actions), strict=True):
            self.comms.phase = phase
            self.do(action)
        for _, sent in self.leaving.values():
            sent.wait()

    def do(self, action: Action) -> None:
        kind, stage, micro, peer, parts = action
        if kind == "F":
            self.forward(stage, micro)
        elif kind in ("I", "B"):
            self.backward(stage, micro, weights=kind == "B")
        elif kind == "W":
            self.worker.backward_of_weights(stage, micro)
        elif kind == "OVERLAP_F_B":
            for part in parts:
                self.comms.phase = pipeline.phase_of(part.kind)
                self.do(part)
        elif kind in ("RECV_F", "RECV_B"):
            buffer = self.worker.buffer(kind[-1], stage, micro)
            self.arriving[kind[-1], stage, micro] = buffer, self.comms.receive(buffer, PP, peer, f"stage {stage}")
        elif kind in ("SEND_F", "SEND_B"):
            self.send(kind[-1], stage, micro, peer)
        elif kind == "UNSHARD":
            self.worker.unshard(stage)
        elif kind == "RESHARD":
            self.worker.reshard(stage)
        elif kind == "REDUCE_GRAD":
            self.worker.reduce(stage)
        elif kind == "SUM_TIED":
            self.sum_tied(peer)
        elif kind == "SHARE_LOSS":
            self.worker.share_loss(peer)

    def forward(self, stage: int, micro: int) -> None:
        source = self.schedule.input_of(stage, micro)
        x = None if source is None else self.take("F", (stage, micro), source)
        y = self.worker.forward(stage, micro, x)
        if y is not None:
            self.made["F", stage, micro] = y

    def backward(self, stage: int, micro: int, weights: bool) -> None:
        last = stage + 1 == self.schedule.stages
        grad = None if last else self.take("B", (stage, micro), (stage + 1, micro))
        dx = self.worker.backward(stage, micro, grad, weights)
        if dx is not None:
            self.made["B", stage, micro] = dx

    def take(self, way: str, mine: tuple[int, int], source: tuple[int, int]) -> Tensor:
        """Input of a stage: received, or made by another stage of this rank."""
        if not self.schedule.crosses(mine[0], source[0]):
            return self.made.pop((way, *source))
        buffer, message = self.arriving.pop((way, *mine))
        message.wait()
        return buffer

    def sum_tied(self, peer: int) -> None:
        own = self.worker.tied_gradients()
        sent = self.comms.reachable(own)
        theirs = torch.empty_like(sent)
        arriving, leaving = self.comms.receive(theirs, PP, peer, "tied"), self.comms.send(sent, PP, peer, "tied")
        arriving.wait()
        leaving.wait()
        own.add_(theirs.to(own.device))

    def send(self, way: str, stage: int, micro: int, peer: int) -> None:
        tensor = self.made.pop((way, stage, micro)).contiguous()
        to = stage + 1 if way == "F" else stage - 1
        sent = self.comms.send(tensor, PP, peer, f"stage {to}")
        if (before := self.leaving.pop((peer, way), None)) is not None:
            before[1].wait()
        if not sent.is_completed():
            self.leaving[peer, way] = tensor, sent


def execute(schedule: PipelineSchedule, comms: Comms, worker: Worker) -> None:
    """Do what `schedule` has for this rank of the pipeline. At the end all that was started here is complete, but for
    the reductions, which the worker's owner waits for."""
    _Execution(schedule, comms, worker).run(comms.index(PP))
