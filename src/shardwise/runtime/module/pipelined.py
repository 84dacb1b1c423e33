"""Training steps of a user's module over the stages of a pipeline, in the order of the layout's schedule.

Messages have the shapes of what the module makes of the batch. The first batch of each kind passes through all stages
once without gradients, so that every rank knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from shardwise.layout.axes import DATA, PP
from shardwise.ops.gradients import WeightGradient
from shardwise.runtime.module.stages import LARGEST, ModuleStages
from shardwise.runtime.pipeline.executor import execute

if TYPE_CHECKING:
    from shardwise.runtime.module.parts import PartRunner

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""dtypes of tensors between stages, by their codes in a header."""
Loss = Callable[[Any], tuple[Tensor, Tensor]]
"""Micro-batch -> (summed loss, tokens), by the whole module's forward."""
Kind = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shapes and dtypes of a batch's tensors."""


def kind_of(batch: Any) -> Kind:
    """Two batches of one kind have messages of the same shapes."""
    leaves = _pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))


class Messages:
    """Shapes of the tensors between stages, by kind of batch."""

    def __init__(self, runner: PartRunner, stages: ModuleStages) -> None:
        self.runner, self.stages = runner, stages
        self._outputs: dict[Kind, dict[int, Tensor]] = {}
        """Kind -> stage -> its output on the meta device, for outputs that this rank makes or takes."""

    def buffer(self, batch: Any, stage: int) -> Tensor:
        """Memory for a stage's output, or its gradient."""
        return torch.empty_like(self._outputs[kind_of(batch)][stage], device=self.runner.device)

    def learn(self, loss: Loss, batches: Sequence[Any]) -> None:
        """Know the shapes for these batches. Buffers and random numbers are afterwards as they were."""
        for batch in batches:
            if (kind := kind_of(batch)) in self._outputs:
                continue
            outputs: dict[int, Tensor] = {}
            buffers = [(buffer, buffer.clone()) for buffer in self.runner.module.buffers()]
            devices = [self.runner.device] if self.runner.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                self.pass_through(lambda batch=batch: loss(batch), outputs, ends=False)  # type: ignore[misc]
            for buffer, before in buffers:
                buffer.copy_(before)
            self._outputs[kind] = outputs

    def pass_through(self, forward: Callable[[], Any], outputs: dict[int, Tensor], ends: bool = True) -> Any:
        """One forward pass over all stages without gradients; its result on ranks with the last one, else None. ends:
        whether the last stage computes. outputs: takes the stages' outputs on the meta device."""
        comms, where, x, result = self.runner.comms, self.stages.where, None, None
        mine = comms.index(PP)
        with torch.no_grad():
            for stage, rank in enumerate(where):
                if stage and mine in (where[stage - 1], rank):
                    x = self._handed_on(x, where[stage - 1], rank)
                    outputs[stage - 1] = torch.empty_like(x, device="meta")
                if rank == mine and (ends or stage < self.stages.last):
                    result = x = self.runner.run_stage(stage, x, forward)
        return result if ends and mine == where[-1] else None

    def _handed_on(self, x: Tensor | None, source: int, target: int) -> Tensor:
        """A tensor from one rank of the pipeline to another, after a header with its shape."""
        comms, device = self.runner.comms, self.runner.device
        header = torch.zeros(LARGEST + 2, dtype=torch.int64, device=device)
        if source == target:
            assert x is not None
            return x
        if comms.index(PP) == source:
            assert x is not None
            x = x.contiguous()
            header[: x.dim() + 2] = torch.tensor([DTYPES.index(x.dtype), x.dim(), *x.shape])
            for message in (header, x):
                comms.send(message, PP, target, "messages").wait()
            return x
        comms.receive(header, PP, source, "messages").wait()
        code, dims, *shape = header.tolist()
        out = torch.empty(shape[:dims], dtype=DTYPES[code], device=device)
        comms.receive(out, PP, source, "messages").wait()
        return out


class StepWorker:
    """Computation of one step (`Worker` of the executor). loss: of a micro-batch, by the module's own forward.

    Gradients are scaled by the tokens of the first micro-batch that ends, as if the others had as many.
    """

    def __init__(self, runner: PartRunner, messages: Messages, loss: Loss, batches: Sequence[Any]) -> None:
        self.runner, self.engine, self.messages = runner, runner.engine, messages
        self.loss, self.batches, self.last = loss, batches, messages.stages.last
        self.unshard, self.reshard, self.reduce = self.engine.unshard, self.engine.reshard, self.engine.reduce
        self.tied_gradients = self.engine.tied_gradients
        self.total = torch.zeros((), dtype=torch.float64, device=runner.device)
        self.first: float | None = None
        """Tokens of the first micro-batch on all data ranks; None on ranks without the last stage."""
        self.later = torch.zeros((), dtype=torch.float64, device=runner.device)
        self._begun: dict[tuple[int, int], tuple[Tensor | None, Any]] = {}
        """(stage, micro-batch) -> (its input, where its backward starts)."""
        self._kept: dict[tuple[int, int], list[WeightGradient]] = {}

    def buffer(self, way: str, stage: int, micro: int) -> Tensor:
        """Memory for a message that a stage takes: forward its input, backward its output's gradient."""
        return self.messages.buffer(self.batches[micro], stage - 1 if way == "F" else stage)

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        """As of `Worker`."""
        if x is not None:
            x = x.detach().requires_grad_()
        result = self.runner.run_stage(stage, x, lambda: self.loss(self.batches[micro]))
        if stage == self.last:
            loss, count = result
            self._count(count)
            assert self.first is not None
            self.total += loss.detach()
            self._begun[stage, micro] = x, loss / self.assumed
            out = None
        else:
            if not result.requires_grad:  # all that computes it is frozen
                result = result.detach().requires_grad_()
            # The graph alone: what it does not need of the output goes when that has been sent.
            self._begun[stage, micro] = x, torch.autograd.graph.get_gradient_edge(result)
            out = result.detach()
        del result
        self._moment()
        return out

    @property
    def assumed(self) -> float:
        """Tokens by which gradients are divided."""
        return (self.first or 0) * len(self.batches) or 1

    def _count(self, count: Tensor) -> None:
        if self.first is None:
            self.first = self.runner.over_data(count)
        else:
            self.later += count

    def backward(self, stage: int, micro: int, grad: Tensor | None, weights: bool) -> Tensor | None:
        """As of `Worker`."""
        x, start = self._begun.pop((stage, micro))
        parts = list(reversed(self.runner.plan.stages[stage]))
        self.runner.open_parts(parts)
        if weights:
            torch.autograd.backward(start, grad)
            for part in parts:
                self.runner.finish_part(part)
        else:
            with self.runner.weights.split_weight_grad() as products:
                torch.autograd.backward(start, grad)
            self._kept[stage, micro] = products
        del start, grad
        self._moment()
        return None if x is None else x.grad

    @torch.no_grad()
    def backward_of_weights(self, stage: int, micro: int) -> None:
        """As of `Worker`."""
        products = self._kept.pop((stage, micro))
        assert {product.part for product in products} <= set(self.runner.plan.stages[stage])
        for part in reversed(self.runner.plan.stages[stage]):
            self.engine.use_unit("weights", part)
            for product in [each for each in products if each.part == part]:
                product.add()
            self.runner.finish_part(part)
        products.clear()
        self._moment()

    def share_loss(self, holder: int) -> None:
        """As of `Worker`."""
        comms = self.runner.comms
        if comms.index(PP) != holder:
            self.total.zero_()
        with comms.in_phase("loss"):
            comms.all_reduce(self.total, DATA + PP, "loss")

    def _moment(self) -> None:
        self.runner.after_compute([product for products in self._kept.values() for product in products])

    def tokens(self) -> tuple[float, float]:
        """(tokens by which gradients were divided, tokens of all ranks), on every rank."""
        numbers = torch.zeros(2, dtype=torch.float64, device=self.runner.device)
        if self.first is not None:
            numbers[0], numbers[1] = self.assumed, self.first + self.runner.over_data(self.later)
        comms = self.runner.comms
        with comms.in_phase("loss"):
            comms.all_reduce(numbers, PP, "valid tokens")
        assumed, tokens = numbers.tolist()
        return assumed, tokens


def gradients(
    runner: PartRunner, messages: Messages, loss: Loss, batches: Sequence[Any]
) -> tuple[StepWorker, float, float]:
    """Forward and backward of a step's micro-batches. Returns (the worker, tokens by which gradients were divided,
    tokens of all ranks)."""
    assert runner.plan.schedule is not None
    worker = StepWorker(runner, messages, loss, batches)
    runner.engine.begin_step()
    execute(runner.plan.schedule, runner.comms, worker)
    runner.engine.finish_step()
    return worker, *worker.tokens()
