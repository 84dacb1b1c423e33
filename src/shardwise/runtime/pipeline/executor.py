"""The executor of pipeline schedules: it takes its rank's actions one by one, and decides nothing.

`execute` does what `schedule/pipeline/action.py` says of each kind: it posts, sends and hands over what stages make,
and asks a `Worker` to compute, gather and reduce. Those of `train` and `evaluate` compute a decoder's `StageRunner`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.decoder import Batch
from shardwise.layout import pipeline
from shardwise.layout.axes import DATA, PP
from shardwise.ops.gradients import WeightGradient
from shardwise.runtime.pipeline.stages import StageRunner
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


def train(
    stages: StageRunner, schedule: PipelineSchedule, micro_batches: list[tuple[Batch, Tensor]], tokens: int
) -> Tensor:
    """Forward and backward of a step's micro-batches; their loss, summed over all tokens of the global batch."""
    training = _Training(stages, micro_batches, tokens)
    execute(schedule, stages.comms, training)
    return training.total


def evaluate(stages: StageRunner, batch: Batch, targets: Tensor) -> Tensor:
    """The summed loss of one micro-batch on every data rank, summed over them."""
    plan = stages.plan
    evaluation = _Evaluation(stages, batch, targets)
    schedule = pipeline.evaluation(plan.layout, plan.model.tied)
    execute(schedule, stages.comms, evaluation)
    evaluation.share_loss(schedule.loss_rank)
    return evaluation.total


class _Work:
    def __init__(self, stages: StageRunner) -> None:
        self.stages, self.engine = stages, stages.engine
        self.unshard, self.reshard, self.reduce = self.engine.unshard, self.engine.reshard, self.engine.reduce
        self.tied_gradients = self.engine.tied_gradients
        self.last = len(pipeline.placement(stages.plan.layout)) - 1
        self.total = torch.zeros((), dtype=torch.float64, device=stages.device)

    def buffer(self, way: str, stage: int, micro: int) -> Tensor:
        plan = self.stages.plan
        shape = plan.layout.micro, plan.stream_tokens // plan.layout.micro, plan.model.hidden
        return torch.empty(shape, dtype=getattr(torch, plan.layout.dtype), device=self.stages.device)

    def share_loss(self, holder: int) -> None:
        """One rank of each pipeline has its sum: the others add nothing."""
        comms = self.stages.comms
        if comms.index(PP) != holder:
            self.total.zero_()
        with comms.in_phase("loss"):
            comms.all_reduce(self.total, DATA + PP, "loss")


class _Training(_Work):
    def __init__(self, stages: StageRunner, micro_batches: list[tuple[Batch, Tensor]], tokens: int) -> None:
        super().__init__(stages)
        self.given, self.tokens = micro_batches, max(1, tokens)
        self.batches: dict[int, Batch] = {}
        self.begun: dict[tuple[int, int], tuple[Tensor | None, Any]] = {}
        """(stage, micro-batch) -> (its input, where its backward starts)."""
        self.kept: dict[tuple[int, int], list[WeightGradient]] = {}

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        batch, targets = self.given[micro]
        # Tables that blocks share are made once for all stages of the rank, and go with the last stage with blocks.
        shared = self.batches.setdefault(micro, batch.fresh()) if self._attends(stage) else batch
        if x is not None:
            x = x.detach().requires_grad_()
        y = self.stages.forward(stage, x, shared)
        if stage == self.last:
            loss = self.stages.loss(y, targets)
            self.total += loss.detach()
            self.begun[stage, micro] = x, loss / self.tokens
            out = None
        else:
            # The graph alone: what it does not need of the output goes when that has been sent.
            self.begun[stage, micro] = x, torch.autograd.graph.get_gradient_edge(y)
            out = y.detach()
        del y
        self._moment()
        return out

    def backward(self, stage: int, micro: int, grad: Tensor | None, weights: bool) -> Tensor | None:
        x, start = self.begun.pop((stage, micro))
        with self._products(stage, micro, weights):
            torch.autograd.backward(start, grad)
            if stage == 0:
                self.engine.finish_backward(self.stages.plan.stages[stage][0])
        if not any(waiting == micro and self._attends(other) for other, waiting in self.begun):
            self.batches.pop(micro, None)
        del start, grad
        if x is None:
            self._moment()
            return None
        dx = x.grad
        del x
        self._moment()
        return dx

    def _attends(self, stage: int) -> bool:
        return bool(self.stages.plan.blocks(stage))

    @contextmanager
    def _products(self, stage: int, micro: int, weights: bool) -> Iterator[None]:
        if weights:
            yield
            return
        with self.stages.weights.split_weight_grad() as products:
            yield
        self.kept[stage, micro] = products

    @torch.no_grad()
    def backward_of_weights(self, stage: int, micro: int) -> None:
        products = self.kept.pop((stage, micro))
        for part in reversed(self.stages.plan.stages[stage]):
            self.engine.use_unit("weights", part)
            for product in [each for each in products if each.part == part]:
                product.add()
            self.engine.finish_backward(part)
        products.clear()
        self._moment()

    def _moment(self) -> None:
        self.stages.after_compute([product for products in self.kept.values() for product in products])


class _Evaluation(_Work):
    def __init__(self, stages: StageRunner, batch: Batch, targets: Tensor) -> None:
        super().__init__(stages)
        self.batch, self.targets = batch.fresh(), targets

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        y = self.stages.infer(stage, x, self.batch)
        if stage < self.last:
            return y
        self.total += self.stages.loss(y, self.targets)
        return None

    def backward(self, stage: int, micro: int, grad: Tensor | None, weights: bool) -> Tensor | None:
        raise AssertionError("an evaluation has no backward pass")

    def backward_of_weights(self, stage: int, micro: int) -> None:
        raise AssertionError("an evaluation has no backward pass")
