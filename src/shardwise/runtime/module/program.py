"""Training steps of a user's module: forward and backward of every micro-batch, then the optimizer."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.layout.experts import RoutedRows
from shardwise.layout.gradients import gradients_over
from shardwise.layout.units import UnitPlan
from shardwise.runtime.checkpointing import Position
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.module.context import TokenLoss
from shardwise.runtime.module.describe import DescribedModule
from shardwise.runtime.module.parts import PartRunner
from shardwise.runtime.module.pipelined import Loss, Messages, ModuleWorker
from shardwise.runtime.offload.file import Kept, offload_file
from shardwise.runtime.pipeline.program import StepOutcome, StepProgram
from shardwise.runtime.sync.outer_step import Rounds
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.flat_unit import Values

LossFunction = Callable[[Callable[..., Any], Any], Any]
"""(module, micro-batch) -> (summed loss, how many tokens it is summed over), or a mean loss alone."""


class LossModule:
    """The module as a traced loss sees it: a call is a forward pass of the program, all else is the module's own."""

    def __init__(self, program: ModuleProgram) -> None:
        self._program, self._run = program, program.run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._program.attribute(name)


class ModuleProgram(StepProgram, PartRunner):
    """A user's module bound to its buffers and ready to step."""

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
        kept: Kept | None = None,
    ) -> None:
        """folder: where the rank's file of offloaded state is made, if there is any. kept: the state in it that counts.
        Raises `UserError` when it cannot be made."""
        file = offload_file(plan, folder, comms.rank, kept.slot if kept else None)
        super().__init__(module, described, plan, comms, device, file)
        self._removal = weakref.finalize(self, file.close, True) if file is not None else None
        self.layout = replace(plan.layout, sp=bool(described.sequence.blocks))
        """The layout of reports: what sp adds is in the description, not in the plan."""
        self.rounds, self.steps = Rounds.of(plan.layout, 0), 0
        """Rounds of outer steps; steps so far, skipped ones included."""
        self.messages = Messages(self, self.stages) if self.stages is not None else None
        self._trained = [p.name for p in plan.blueprint.parameters() if not p.frozen]
        self._frozen = [p.name for p in plan.blueprint.parameters() if p.frozen]
        self._slots = {
            placed.name: slot
            for flat in self.engine.trained
            for placed, slot in zip(flat.unit.placed, flat.grad_slots, strict=True)
        }
        self.bind_optimizer(optimizer, values, {}, kept)

    @property
    def routed(self) -> RoutedRows | None:
        """As of `StepProgram`; of a part with several modules of experts their sum."""
        rows = {}
        for part, forms in self.experts.items():
            of_micros = zip(*(form.exchanged for form in forms), strict=True)
            rows[part] = [[sum(counts) for counts in zip(*counted, strict=True)] for counted in of_micros]
        return RoutedRows.of(rows) if any(rows.values()) else None

    def close(self, remove: bool = True) -> None:
        """As of `StepProgram`; else the file goes with the module."""
        if self._removal is not None and remove:
            self._removal()

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
        if self.rows is not None and not self.steps:
            loss_fn = TokenLoss(self, loss_fn)
        outcome = self.train(self.worker(loss_fn, micro_batches), lr, self.rounds.ends(self.steps))
        self.steps += 1
        return outcome

    @property
    def position(self) -> Position:
        """Progress, the same on all ranks. Raises `UserError` between two outer steps, where replicas have different
        weights."""
        updates = self.optimizer.steps
        if self.outer is None:
            return Position(updates, 0, updates)
        if not self.rounds.begins(self.steps):
            left = self.rounds.every - self.steps % self.rounds.every
            raise UserError(
                f"sync=local: replicas have different weights until their next outer step: save after {left} more "
                f"step{'s' * (left > 1)}"
            )
        return Position(self.steps, 0, updates)

    def diverged(self, outcome: StepOutcome) -> str:
        """Where a run that must be finite has diverged, in words; empty where it has not. The same on all ranks:
        replicas that train apart learn of each other's steps at an outer one."""
        if self.outer is None and outcome.skipped:
            return f"the loss is {outcome.loss}, the gradient norm {outcome.grad_norm}; no update was made"
        if self.outer is not None and self.rounds.begins(self.steps):
            skips = sum(not math.isfinite(loss) for loss in self.outer.losses)
            if skips:
                return (
                    f"in {skips} of the last {self.rounds.every} steps the loss or the gradient norm of a replica was "
                    "not finite, and its update was not made"
                )
        return ""

    def idle_parameters(self) -> Collection[str]:
        """As of `StepProgram`."""
        came = [name in self._slots and self._slots[name].arrived for name in self._trained]
        counts = torch.tensor(came, dtype=torch.int64, device=self.device)
        with self.comms.in_phase("loss"):
            self.comms.all_reduce(counts, gradients_over(self.plan), "gradients")
        if not self.comms.moves_data:
            return frozenset()
        return frozenset(name for name, count in zip(self._trained, counts.tolist(), strict=True) if not count)

    def _begin_step(self) -> None:
        """No gradient has come, whatever a step that failed has left. Raises `UserError` for a parameter that trains
        but has no room for a gradient."""
        self.evaluating = False
        for flat in self.engine.trained:
            flat.full_grads.free()
            flat.grads.free()
        for slot in self._slots.values():
            slot.arrived = False
        for form in (form for forms in self.experts.values() for form in forms):
            form.exchanged.clear()
        if late := next((name for name in self._frozen if self.module.get_parameter(name).requires_grad), None):
            raise UserError(
                f"{late} was frozen when the module was split, so it has no gradient and no moments: set "
                "requires_grad before split, or save, split again and load"
            )
        self.freezes = bool(self._frozen) or not all(
            self.module.get_parameter(name).requires_grad for name in self._slots
        )

    def gradients(self, loss_fn: LossFunction, micro_batches: Sequence[Any]) -> None:
        """Compute the gradients of the mean loss over all ranks' tokens."""
        self.run_passes(self.worker(loss_fn, micro_batches))

    def worker(self, loss_fn: LossFunction, micro_batches: Sequence[Any]) -> ModuleWorker:
        """The computation of a step."""
        self._begin_step()
        self.learn_shapes(loss_fn, micro_batches)
        return ModuleWorker(self, self.messages, self.loss_of(loss_fn), micro_batches)

    def loss_of(self, loss_fn: LossFunction) -> Loss:
        """(loss, tokens) of a micro-batch."""
        return lambda batch: _loss_and_count(loss_fn(LossModule(self), batch), self.device, self.rows is not None)

    def learn_shapes(self, loss_fn: LossFunction, micro_batches: Sequence[Any]) -> None:
        """Know the shapes of a pipeline's messages for these batches."""
        if self.messages is not None:
            self.messages.learn(self.loss_of(loss_fn), micro_batches)


def _loss_and_count(result: Any, device: torch.device, cut: bool) -> tuple[Tensor, Tensor]:
    """(loss, tokens) from what a loss function returned. cut: of rows whose other tokens are on other ranks, where a
    mean alone would count ranks in place of tokens. Raises `UserError` for anything else. A number of tokens that
    is negative or not finite becomes NaN, which all ranks see in their sum."""
    loss, count = result if isinstance(result, tuple) and len(result) == 2 else (result, 1)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UserError(
            "loss_fn must return (summed loss, number of tokens), or a mean loss alone: a tensor of one element that "
            "depends on the module"
        )
    if cut and result is loss:
        raise UserError(
            "cp: a mean loss alone leaves open how many of a row's tokens are on this rank: return (summed loss, "
            "number of tokens)"
        )
    number = torch.as_tensor(count).detach().to(device, torch.float64).reshape(())
    return loss.reshape(()), torch.where((number >= 0) & number.isfinite(), number, math.nan)
