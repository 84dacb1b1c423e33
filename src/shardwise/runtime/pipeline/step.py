"""One training step of a split decoder: forward and backward of every micro-batch, in the order of the plan.

Without a pipeline micro-batches come one after the other; with one, `pipeline.py` has the order.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.decoder import Batch
from shardwise.layout.axes import DATA
from shardwise.layout.units import UnitPlan
from shardwise.report.step_report import Bytes
from shardwise.runtime.expert.exchange import ExpertLoads
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.offload.file import Kept, file_bytes, offload_file
from shardwise.runtime.pipeline.executor import evaluate, train
from shardwise.runtime.pipeline.stages import StageRunner
from shardwise.runtime.sync.outer_step import OuterStep
from shardwise.runtime.tensor.loss import IGNORED
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.flat_unit import Values
from shardwise.runtime.zero.optimizer import Optimizer

MakeOptimizer = Callable[..., Any]
"""(engine, comms, values=...) -> an `Optimizer`, or what acts as one."""


class TrainProgram(StageRunner):
    """A decoder cut, bound to its buffers and ready to step. `values` gives the initial weights.

    optimizer: its settings, or what makes another one.

    folder: where the rank's file of offloaded state is made, if there is any. kept: the state in it that counts,
    instead of initial weights. Raises `UserError` when the file cannot be made.
    """

    def __init__(
        self,
        plan: UnitPlan,
        comms: Comms,
        optimizer: OptimizerConfig | MakeOptimizer,
        values: Values,
        device: torch.device,
        folder: Path | None = None,
        kept: Kept | None = None,
    ) -> None:
        file = offload_file(plan, folder, comms.rank, kept.slot if kept else None)
        super().__init__(plan, comms, device, file)
        make: MakeOptimizer = (
            partial(Optimizer, config=optimizer) if isinstance(optimizer, OptimizerConfig) else optimizer
        )
        self.optimizer = make(self.engine, comms, values=values)
        if kept:
            self.optimizer.use_kept(kept.about["updates"])
        self.outer = OuterStep(self.optimizer, comms) if plan.layout.local_sgd else None
        self.expert_loads = ExpertLoads(self.parts, plan, comms, device)
        with comms.in_phase("optimizer"):
            self.engine.all_gather_params()
        self.computed: Callable[[], object] = _nothing
        """Called when the arithmetic of a step is done, before its exchange is waited for."""
        self.compile_seconds = 0.0
        if plan.layout.compile == "block" and plan.first_blocks:
            self._compile()

    def _compile(self) -> None:
        from shardwise.runtime.compiling import compile_blocks, write_gradients  # brings in the compiler

        plan = self.plan
        self.comms.pulse.work("the compilation of the blocks")
        with self.engine.compile_guard(plan.first_blocks[0]):
            compiled = compile_blocks(self.decoder, plan, self.device)
        self.compile_seconds = compiled.seconds
        for name in plan.of_kind("block") if compiled.whole else ():
            write_gradients(self.parts[name])
            self.engine.overwrite(name)
        self.expert_loads.forget()

    def step(
        self, micro_batches: list[tuple[Batch, Tensor]], lr: float, agrees: bool = True
    ) -> tuple[float, float, int]:
        """Train on one global batch. micro_batches: this rank's (batch, targets [B, S]). agrees: whether an outer step
        ends it, where replicas train apart from each other.

        Returns (loss, gradient norm, valid tokens), the same numbers on every rank of a replica: the loss is the mean
        over the valid tokens of the replica's batch.
        """
        tokens = self._count_valid([targets for _, targets in micro_batches])
        self.engine.begin_step()
        if self.plan.schedule is not None:
            total = train(self, self.plan.schedule, micro_batches, tokens)
        else:
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for batch, targets in micro_batches:
                self.engine.begin_micro_batch()
                total += self._train(batch.fresh(), targets, tokens)
        self.computed()
        self.engine.finish_step()
        if self.plan.schedule is None:
            with self.comms.in_phase("loss"):
                self.comms.all_reduce(total, DATA, "loss")
        self.optimizer.tell(summed := self.comms.read(total), tokens)
        loss, norm = summed / max(1, tokens), self.optimizer.step(lr)
        self.expert_loads.finish_step(self.optimizer)
        if self.outer is not None and agrees:
            self.outer.step()
        self.optimizer.commit()
        self.engine.all_gather_params()
        if self.outer is not None:
            self.outer.count_loss(math.nan if self.optimizer.skipped else loss, tokens, agrees)
        return loss, norm, tokens

    @property
    def bytes_on_disk(self) -> Bytes:
        """Bytes of the rank's file, by class."""
        return file_bytes(self.engine.file)

    def close(self, remove: bool = False) -> None:
        """Let go of the rank's file of offloaded state, and remove it."""
        if self.engine.file is not None:
            self.engine.file.close(remove)

    def evaluate(self, batch: Batch, targets: Tensor) -> tuple[float, int]:
        """(summed loss, valid tokens) of one micro-batch on every data rank, summed over them; nothing is trained."""
        with torch.no_grad():
            tokens = self._count_valid([targets])
            if self.plan.layout.pp > 1:
                return self.comms.read(evaluate(self, batch, targets)), tokens
            self.engine.begin_evaluation()
            loss = self.loss(self.infer(0, None, batch.fresh()), targets).double()
            with self.comms.in_phase("loss"):
                self.comms.all_reduce(loss, DATA, "loss")
        return self.comms.read(loss), tokens

    def _count_valid(self, targets: list[Tensor]) -> int:
        count = torch.zeros(1, dtype=torch.int64, device=self.device)
        for each in targets:
            count += (each != IGNORED).sum()
        with self.comms.in_phase("loss"):
            self.comms.all_reduce(count, DATA, "valid tokens")
        return int(self.comms.read(count))

    def _train(self, batch: Batch, targets: Tensor, tokens: int) -> Tensor:
        loss = self.loss(self.forward(0, None, batch), targets)
        self.after_compute([])
        (loss / max(1, tokens)).backward()
        self.engine.finish_backward(self.plan.parts[0])
        return loss.detach()


def _nothing() -> None:
    """No-op: nothing is injected into steps."""
