"""Training steps of a user's module: forward and backward of every micro-batch, then the optimizer."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.layout.axes import DATA
from shardwise.layout.units import UnitPlan
from shardwise.report.step_report import Bytes
from shardwise.runtime.expert.exchange import ExpertLoads
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.module.describe import DescribedModule
from shardwise.runtime.module.parts import PartRunner
from shardwise.runtime.module.pipelined import Loss, Messages, gradients
from shardwise.runtime.offload.file import file_bytes, offload_file
from shardwise.runtime.sync.outer_step import OuterStep
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.flat_unit import Values
from shardwise.runtime.zero.optimizer import Optimizer

LossFunction = Callable[[Callable[..., Any], Any], Any]
"""(module, micro-batch) -> (summed loss, how many tokens it is summed over), or a mean loss alone."""


class StepOutcome(NamedTuple):
    """Result of a training step, the same on every rank."""

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


class ModuleProgram(PartRunner):
    """A user's module bound to its buffers and ready to step. It has what `TrainProgram` has for reports and
    checkpoints."""

    outer: OuterStep | None = None

    def __init__(
        self,
        module: nn.Module,
        described: DescribedModule,
        plan: UnitPlan,
        comms: Comms,
        optimizer: OptimizerConfig,
        values: Values,
        device: torch.device,
        folder: Path | None = None,
    ) -> None:
        """folder: where the rank's file of offloaded state is made, if there is any. Raises `UserError` when it cannot
        be made."""
        file = offload_file(plan, folder, comms.rank)
        super().__init__(module, described, plan, comms, device, file)
        self.close: Callable[[], object] = lambda: None
        """Remove the rank's file of offloaded state, which else goes with the program."""
        if file is not None:
            self.close = weakref.finalize(self, file.close, True)
        self.optimizer = Optimizer(self.engine, comms, optimizer, values)
        self.layout = replace(plan.layout, sp=bool(described.sequence.blocks))
        """The layout of reports: what sp adds is in the description, not in the plan."""
        self.expert_loads = ExpertLoads({}, plan, comms, device)
        self.messages = Messages(self, self.stages) if self.stages is not None else None
        self._trained = [p.name for p in plan.blueprint.parameters() if not p.frozen]
        self._frozen = [p.name for p in plan.blueprint.parameters() if p.frozen]
        self._slots = {
            placed.name: slot
            for flat in self.engine.trained
            for placed, slot in zip(flat.unit.placed, flat.grad_slots, strict=True)
        }
        with comms.in_phase("optimizer"):
            self.engine.all_gather_params()

    @property
    def bytes_on_disk(self) -> Bytes:
        """Bytes of the rank's file, by class."""
        return file_bytes(self.engine.file)

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """A forward pass without gradients. All ranks call it together. Under a pipeline the last stage's ranks alone
        have its result."""
        if self.messages is not None:
            return self.messages.pass_through(lambda: self.run(*args, **kwargs), {})
        with torch.no_grad():
            self.engine.begin_evaluation()
            return self.run(*args, **kwargs)

    def step(self, loss_fn: LossFunction, micro_batches: Sequence[Any], lr: float) -> StepOutcome:
        """Train on this rank's micro-batches. Raises `UserError` when there are more or fewer than the plan has."""
        if len(micro_batches) != self.plan.micro_batches:
            raise UserError(
                f"{len(micro_batches)} micro-batches for a split that accumulates {self.plan.micro_batches}: give as "
                "many, or split with accumulate="
            )
        total, tokens = self.gradients(loss_fn, micro_batches)
        if self.messages is None:
            with self.comms.in_phase("loss"):
                self.comms.all_reduce(total, DATA, "loss")
        self.optimizer.tell(summed := self.comms.read(total), tokens)
        self.optimizer.idle = self._without_gradient()
        loss, norm = summed / (tokens or 1), self.optimizer.step(lr)
        self.optimizer.commit()
        self.engine.all_gather_params()
        return StepOutcome(loss, norm, int(tokens) if tokens.is_integer() else tokens)

    def _without_gradient(self) -> frozenset[str]:
        """Parameters for which no rank has computed a gradient in this step."""
        came = [name in self._slots and self._slots[name].arrived for name in self._trained]
        counts = torch.tensor(came, dtype=torch.int64, device=self.device)
        with self.comms.in_phase("loss"):
            self.comms.all_reduce(counts, self.plan.gradients_over, "gradients")
        if not self.comms.moves_data:
            return frozenset()
        return frozenset(name for name, count in zip(self._trained, counts.tolist(), strict=True) if not count)

    def _begin_step(self) -> None:
        """No gradient has come, whatever a step that failed has left. Raises `UserError` for a parameter that trains
        but has no room for a gradient."""
        for flat in self.engine.trained:
            flat.full_grads.free()
            flat.grads.free()
        for slot in self._slots.values():
            slot.arrived = False
        if late := next((name for name in self._frozen if self.module.get_parameter(name).requires_grad), None):
            raise UserError(
                f"{late} was frozen when the module was split, so it has no gradient and no moments: set "
                "requires_grad before split, or save, split again and load"
            )
        self.freezes = bool(self._frozen) or not all(
            self.module.get_parameter(name).requires_grad for name in self._slots
        )

    def gradients(self, loss_fn: LossFunction, micro_batches: Sequence[Any]) -> tuple[Tensor, float]:
        """Compute the gradients of the mean loss over all ranks' tokens. Returns (this rank's summed loss, tokens of
        all ranks); under a pipeline the loss is summed over all ranks.

        A micro-batch's tokens are known after its forward pass, those of later ones only then. So gradients are scaled
        by the first one's, as if the others had as many, and once more at the end where they had not.
        """
        self._begin_step()
        if self.messages is not None:
            loss_of = self.loss_of(loss_fn)
            self.messages.learn(loss_of, micro_batches)
            worker, assumed, tokens = gradients(self, self.messages, loss_of, micro_batches)
            self._rescale(assumed, tokens or 1)
            return worker.total, tokens
        self.engine.begin_step()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        later = torch.zeros((), dtype=torch.float64, device=self.device)
        first = 0.0
        for number, batch in enumerate(micro_batches):
            self.engine.begin_micro_batch()
            loss, count = self.loss_of(loss_fn)(batch)
            if number == 0:
                first = self.over_data(count)
            else:
                later += count
            self.after_compute([])
            self.begin_backward()
            with self.backward_errors():
                (loss / (first * len(micro_batches) or 1)).backward()
            self.end_backward()
            total += loss.detach()
        self.engine.finish_step()
        tokens = first + self.over_data(later) if len(micro_batches) > 1 else first
        self._rescale(first * len(micro_batches) or 1, tokens or 1)
        return total, tokens

    def loss_of(self, loss_fn: LossFunction) -> Loss:
        """(loss, tokens) of a micro-batch."""
        return lambda batch: _loss_and_count(loss_fn(self.run, batch), self.device)

    def learn_shapes(self, loss_fn: LossFunction, micro_batches: Sequence[Any]) -> None:
        """Know the shapes of a pipeline's messages for these batches."""
        if self.messages is not None:
            self.messages.learn(self.loss_of(loss_fn), micro_batches)

    def _rescale(self, assumed: float, tokens: float) -> None:
        if assumed != tokens:
            for flat in self.engine.trained:
                flat.grads_interval.mul_(assumed / tokens)


def _loss_and_count(result: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """(loss, tokens) from what a loss function returned. Raises `UserError` for anything else. A number of tokens that
    is negative or not finite becomes NaN, which all ranks see in their sum."""
    loss, count = result if isinstance(result, tuple) and len(result) == 2 else (result, 1)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UserError(
            "loss_fn must return (summed loss, number of tokens), or a mean loss alone: a tensor of one element that "
            "depends on the module"
        )
    number = torch.as_tensor(count).detach().to(device, torch.float64).reshape(())
    return loss.reshape(()), torch.where((number >= 0) & number.isfinite(), number, math.nan)
