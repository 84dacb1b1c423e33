"""Training steps and evaluations of a split decoder."""

from pathlib import Path

import torch
from torch import Tensor

from shardwise.decoder import Batch
from shardwise.layout import pipeline
from shardwise.layout.axes import DATA
from shardwise.layout.units import UnitPlan
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.offload.file import Kept, offload_file
from shardwise.runtime.pipeline.executor import execute
from shardwise.runtime.pipeline.program import MakeOptimizer, StepOutcome, StepProgram, StepWorker
from shardwise.runtime.pipeline.stages import StageRunner
from shardwise.runtime.tensor.loss import IGNORED
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.flat_unit import Values


class TrainProgram(StepProgram, StageRunner):
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
        self.bind_optimizer(optimizer, values, self.parts, kept)
        self.compile_seconds: float | None = 0.0
        if plan.layout.compile == "block" and plan.local.first_blocks:
            self._compile()

    def _compile(self) -> None:
        from shardwise.runtime.compiling import compile_blocks, write_gradients  # brings in the compiler

        plan = self.plan
        self.comms.pulse.work("the compilation of the blocks")
        with self.engine.compile_guard(plan.local.first_blocks[0]):
            compiled = compile_blocks(self.decoder, plan, self.device)
        self.compile_seconds = compiled.seconds
        for name in plan.of_kind("block") if compiled.whole else ():
            write_gradients(self.parts[name])
            self.engine.overwrite(name)
        self.expert_loads.forget()

    def step(self, micro_batches: list[tuple[Batch, Tensor]], lr: float, agrees: bool = True) -> StepOutcome:
        """Train on one global batch, as of `train`. micro_batches: this rank's (batch, targets [B, S])."""
        tokens = self._count_valid([targets for _, targets in micro_batches])
        return self.train(DecoderWorker(self, micro_batches, tokens), lr, agrees)

    def evaluate(self, batch: Batch, targets: Tensor) -> tuple[float, int]:
        """(summed loss, valid tokens) of one micro-batch on every data rank, summed over them; nothing is trained."""
        with torch.no_grad():
            tokens = self._count_valid([targets])
            evaluation = _Evaluation(self, [(batch.fresh(), targets)], tokens)
            if self.plan.layout.pp > 1:
                schedule = pipeline.evaluation(self.plan.layout, self.plan.model.tied)
                execute(schedule, self.comms, evaluation)
                evaluation.share_loss(schedule.loss_rank)
            else:
                self.engine.begin_evaluation()
                evaluation.forward(0, 0, None)
                with self.comms.in_phase("loss"):
                    self.comms.all_reduce(evaluation.total, DATA, "loss")
        return self.comms.read(evaluation.total), tokens

    def _count_valid(self, targets: list[Tensor]) -> int:
        count = torch.zeros(1, dtype=torch.int64, device=self.device)
        for each in targets:
            count += (each != IGNORED).sum()
        with self.comms.in_phase("loss"):
            self.comms.all_reduce(count, DATA, "valid tokens")
        return int(self.comms.read(count))


class DecoderWorker(StepWorker):
    """The computation of a decoder's stages in one step. batches: (batch, targets [B, S]); valid: their valid tokens on
    all data ranks."""

    runner: StageRunner

    def __init__(self, runner: StageRunner, batches: list[tuple[Batch, Tensor]], valid: int) -> None:
        super().__init__(runner, batches)
        self.valid, self.tokens = valid, max(1, valid)
        self._shared: dict[int, Batch] = {}
        """Micro-batch -> its batch, with the tables that blocks share: they are made once for all stages of the rank,
        and go with the last stage with blocks."""

    def buffer(self, way: str, stage: int, micro: int) -> Tensor:
        plan = self.runner.plan
        shape = plan.layout.micro, plan.stream_tokens // plan.layout.micro, plan.model.hidden
        return torch.empty(shape, dtype=getattr(torch, plan.layout.dtype), device=self.runner.device)

    def compute(self, stage: int, micro: int, x: Tensor | None) -> Tensor:
        batch, targets = self.batches[micro]
        shared = self._shared.setdefault(micro, batch.fresh()) if self._attends(stage) else batch
        y = self.runner.forward(stage, x, shared)
        return self.runner.loss(y, targets) if stage == self.last else y

    def release(self, stage: int, micro: int) -> None:
        if not any(waiting == micro and self._attends(other) for other, waiting in self.begun):
            self._shared.pop(micro, None)

    def count_tokens(self) -> float:
        return self.valid

    def _attends(self, stage: int) -> bool:
        return bool(self.runner.plan.local.blocks(stage))


class _Evaluation(DecoderWorker):
    """Forward passes of one micro-batch, for which no backward comes."""

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        batch, targets = self.batches[micro]
        y = self.runner.infer(stage, x, batch)
        if stage < self.last:
            return y
        self.total += self.runner.loss(y, targets)
        return None
