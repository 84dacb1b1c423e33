"""One training step of any module: forward and backward of every micro-batch, then the optimizer.

`Runner` is a module bound to its buffers, `StepWorker` computes its stages, `StepProgram` makes steps. A decoder
(`stages.py`, `step.py`) and a user's module (`runtime/module/`) differ in how a stage computes and tokens are counted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.layout import pipeline
from shardwise.layout.axes import DATA, PP
from shardwise.layout.experts import RoutedRows
from shardwise.layout.units import UnitPlan
from shardwise.ops.gradients import WeightGradient, WeightGradients
from shardwise.report.step_report import Bytes
from shardwise.runtime.expert.exchange import ExpertLoads
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.offload.activations import OffloadedActivations, storages
from shardwise.runtime.offload.file import Kept, OffloadFile, file_bytes
from shardwise.runtime.pipeline.executor import execute
from shardwise.runtime.sync.outer_step import OuterStep
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.engine import Engine
from shardwise.runtime.zero.flat_unit import Values
from shardwise.runtime.zero.optimizer import Optimizer

MakeOptimizer = Callable[..., Any]
"""(engine, comms, values=...) -> an `Optimizer`, or what acts as one."""


def no_callback(*kept: list[WeightGradient]) -> None:
    """No-op."""


class PartBoundary(torch.autograd.Function):
    """Identity on several tensors; its backward calls `reached` once the gradients of all of them are there.

    Autograd runs ready nodes latest-created first: at the inputs of a part it comes after all others of the part, where
    a hook of an input could run before the last accumulation.

    What autograd lets it hand on is the same tensor, which may be changed in place later; the others become views.
    """

    @staticmethod
    def forward(ctx: Any, reached: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reached = reached
        ctx.set_materialize_grads(False)
        same = [tensor for tensor in tensors if not tensor.is_leaf and not tensor._is_view()]
        ctx.mark_dirty(*same)
        return tuple(tensor if any(tensor is one for one in same) else tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.reached()
        return None, *grads


class Runner(ABC):
    """A module bound to its buffers, whose stages on this rank can be computed.

    weights: when the gradients of weights are computed. writing: modules whose gradients do not pass through autograd's
    accumulation. file: of what is offloaded to disk.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: UnitPlan,
        comms: Comms,
        device: torch.device,
        weights: WeightGradients,
        writing: Collection[nn.Module],
        file: OffloadFile | None,
    ) -> None:
        self.module, self.plan, self.comms, self.device, self.weights = module, plan, comms, device, weights
        self.engine = Engine(module, plan, comms, device, writing, weights, file)
        self.offloaded: OffloadedActivations | None = None
        if plan.layout.offloads_activations:
            lasting = self.engine.lasting() | storages(module.buffers())
            self.offloaded = OffloadedActivations(device, comms, self.engine.host, lasting)
        self.after_compute: Callable[[list[WeightGradient]], object] = no_callback
        """Called whenever all that backward will need is there, or some of it has gone: after each forward and backward
        pass of a stage. kept: what is kept of backward passes whose weights come later."""

    def begin_backward(self, stage: int) -> None:
        """The backward pass of a stage is next. Here a no-op: autograd's hooks notice it."""
        return

    @abstractmethod
    def end_backward(self, stage: int) -> None:
        """The backward pass of a stage is over, weights included."""

    def finish_part(self, part: str) -> None:
        """The backward pass of a part is over."""
        self.engine.finish_backward(part)

    def backward_errors(self) -> AbstractContextManager[None]:
        """Around a backward pass, whose errors it puts into words."""
        return nullcontext()


class StepWorker(ABC):
    """The computation of one step's stages (`Worker` of the executor). batches: this rank's micro-batches."""

    tokens: float
    """Tokens by which gradients are divided."""

    def __init__(self, runner: Runner, batches: Sequence[Any]) -> None:
        self.runner, self.engine, self.batches = runner, runner.engine, batches
        self.unshard, self.reshard, self.reduce = self.engine.unshard, self.engine.reshard, self.engine.reduce
        self.tied_gradients = self.engine.tied_gradients
        self.last = len(pipeline.placement(runner.plan.layout)) - 1
        self.total = torch.zeros((), dtype=torch.float64, device=runner.device)
        """Summed loss of the micro-batches that have gone backward."""
        self.begun: dict[tuple[int, int], tuple[Tensor | None, Any, Tensor | None]] = {}
        """(stage, micro-batch) -> (its input, where its backward starts, its loss)."""
        self._kept: dict[tuple[int, int], list[WeightGradient]] = {}

    @abstractmethod
    def buffer(self, way: str, stage: int, micro: int) -> Tensor: ...

    @abstractmethod
    def compute(self, stage: int, micro: int, x: Tensor | None) -> Tensor:
        """The output of a stage, of the last one the summed loss. x: the output of the stage before, None of the
        first."""

    def release(self, stage: int, micro: int) -> None:
        """A stage's backward pass is over. Here a no-op."""
        return

    @abstractmethod
    def count_tokens(self) -> float:
        """Tokens of the step on all data ranks. Called after all passes: gradients are then of the mean over them."""

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        if x is not None:
            x = x.detach().requires_grad_()
        y, out = self.compute(stage, micro, x), None
        if stage == self.last:
            self.begun[stage, micro] = x, y / self.tokens, y.detach()
        else:
            if not y.requires_grad:  # all that computes it is frozen
                y = y.detach().requires_grad_()
            # The graph alone: what it does not need of the output goes when that has been sent.
            self.begun[stage, micro] = x, torch.autograd.graph.get_gradient_edge(y), None
            out = y.detach()
        del y
        self._note_compute()
        return out

    def backward(self, stage: int, micro: int, grad: Tensor | None, weights: bool) -> Tensor | None:
        x, start, loss = self.begun.pop((stage, micro))
        self.runner.begin_backward(stage)
        with self.runner.backward_errors():
            if weights:
                torch.autograd.backward(start, grad)
            else:
                with self.runner.weights.split_weight_grad() as self._kept[stage, micro]:
                    torch.autograd.backward(start, grad)
        if weights:
            self.runner.end_backward(stage)
        self.release(stage, micro)
        if loss is not None:
            self.total += loss
        dx = None if x is None else x.grad
        del x, start, grad
        self._note_compute()
        return dx

    @torch.no_grad()
    def backward_of_weights(self, stage: int, micro: int) -> None:
        products = self._kept.pop((stage, micro))
        assert {product.part for product in products} <= set(self.runner.plan.stages[stage])
        for part in reversed(self.runner.plan.stages[stage]):
            self.engine.use_unit("weights", part)
            for product in [one for one in products if one.part == part]:
                product.add()
            self.runner.finish_part(part)
        products.clear()
        self._note_compute()

    def share_loss(self, holder: int) -> None:
        """One rank of each pipeline has its sum: the others add nothing."""
        comms = self.runner.comms
        if comms.index(PP) != holder:
            self.total.zero_()
        with comms.in_phase("loss"):
            comms.all_reduce(self.total, DATA + PP, "loss")

    def _note_compute(self) -> None:
        self.runner.after_compute([product for products in self._kept.values() for product in products])


class StepOutcome(NamedTuple):
    """Result of a training step, the same on every rank; of `sync=local`, on every rank of a replica."""

    loss: float
    """Mean over the tokens of all ranks and micro-batches."""
    grad_norm: float
    """L2, over the whole module, before clipping."""
    tokens: float
    """Tokens that count in the loss, over all ranks; as many as micro-batches where a loss came as a mean. Weights of
    tokens may make it a fraction."""

    @property
    def skipped(self) -> bool:
        """Whether no update was made, because the loss or the gradients are not finite."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))


class StepProgram(Runner):
    """A module bound to its buffers, with its optimizer: what trains, is measured and is saved."""

    optimizer: Any
    """An `Optimizer`, or what acts as one."""
    outer: OuterStep | None
    expert_loads: ExpertLoads
    computed: Callable[[], object]
    """Called when the arithmetic of a step is done, before its exchange is waited for."""

    def bind_optimizer(
        self, optimizer: OptimizerConfig | MakeOptimizer, values: Values, parts: dict[str, nn.Module], kept: Kept | None
    ) -> None:
        """Set initial weights and make the optimizer. parts: those that may have the catalog's mixtures of experts;
        the rest as of `TrainProgram`."""
        make = partial(Optimizer, config=optimizer) if isinstance(optimizer, OptimizerConfig) else optimizer
        self.optimizer = make(self.engine, self.comms, values=values)
        if kept:
            self.optimizer.use_kept(kept.about["updates"])
        self.outer = OuterStep(self.optimizer, self.comms) if self.plan.layout.local_sgd else None
        self.expert_loads = ExpertLoads(parts, self.plan, self.comms, self.device)
        self.computed = no_callback
        with self.comms.in_phase("optimizer"):
            self.engine.all_gather_params()

    @property
    def routed(self) -> RoutedRows | None:
        """Rows that mixtures of experts have exchanged in the last step; None without any."""
        return self.expert_loads.routed

    def train(self, worker: StepWorker, lr: float, agrees: bool = True) -> StepOutcome:
        """Train on one global batch, that of `worker`. agrees: whether an outer step ends it, where replicas train
        apart from each other: the outcome is then of this rank's replica."""
        tokens = self.run_passes(worker)
        self.optimizer.tell(summed := self.comms.read(worker.total), tokens)
        self.optimizer.idle = self.idle_parameters()
        loss, norm = summed / (tokens or 1), self.optimizer.step(lr)
        self.expert_loads.finish_step(self.optimizer)
        if self.outer is not None and agrees:
            self.outer.step()
        self.optimizer.commit()
        self.engine.all_gather_params()
        if self.outer is not None:
            self.outer.count_loss(math.nan if self.optimizer.skipped else loss, tokens, agrees)
        return StepOutcome(loss, norm, int(tokens) if float(tokens).is_integer() else tokens)

    def run_passes(self, worker: StepWorker) -> float:
        """Forward and backward of every micro-batch: gradients are those of the mean over all ranks' tokens, whose
        number it returns, and `worker.total` is the loss summed over them."""
        schedule = self.plan.pipeline.schedule
        self.engine.begin_step()
        if schedule is not None:
            execute(schedule, self.comms, worker)
        else:
            for micro in range(len(worker.batches)):
                self.engine.begin_micro_batch()
                worker.forward(0, micro, None)
                worker.backward(0, micro, None, weights=True)
        self.computed()
        self.engine.finish_step()
        tokens = worker.count_tokens()
        if schedule is None:
            with self.comms.in_phase("loss"):
                self.comms.all_reduce(worker.total, DATA, "loss")
        return tokens

    def idle_parameters(self) -> Collection[str]:
        """Parameters for which no rank has computed a gradient in this step: none of a decoder's."""
        return ()

    @property
    def bytes_on_disk(self) -> Bytes:
        return file_bytes(self.engine.file)

    def close(self, remove: bool = False) -> None:
        """Let go of the rank's file of offloaded state, and remove it."""
        if self.engine.file is not None:
            self.engine.file.close(remove)
