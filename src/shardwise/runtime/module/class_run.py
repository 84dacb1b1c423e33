"""A rank's part in a run of a model by its class of transformers: the trainer's, with another program."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.checkpoint import Checkpoint
from shardwise.decoder import Batch
from shardwise.errors import UserError
from shardwise.layout.axes import DATA, PP, REPLICA
from shardwise.layout.modules import check_described
from shardwise.layout.units import UnitPlan
from shardwise.model.blueprint import Blueprint
from shardwise.model.parameters import Model
from shardwise.runtime.checkpointing import Position, restore
from shardwise.runtime.job.trainer import TrainingRun
from shardwise.runtime.module.buffers import BuffersBefore, restore_buffers, restore_missed, stored_shapes, written
from shardwise.runtime.module.class_model import ClassModel, ClassSplit
from shardwise.runtime.module.experts import use_exact_products
from shardwise.runtime.module.initial import MetaValues, place_buffers, values_of
from shardwise.runtime.module.program import ModuleProgram
from shardwise.runtime.module.trace import trace
from shardwise.runtime.offload.file import Kept
from shardwise.runtime.pipeline.program import StepOutcome
from shardwise.runtime.tensor.loss import IGNORED
from shardwise.runtime.zero.flat_unit import Values

if TYPE_CHECKING:
    from shardwise.runtime.job.config import TrainConfig


def token_loss(run: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(cross-entropy summed over the tokens that count, their number). batch: (tokens [B, S], next tokens [B, S])."""
    tokens, targets = batch
    logits = run(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    loss = F.cross_entropy(wide, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return loss, (targets != IGNORED).sum()


class ClassProgram(ModuleProgram):
    """What `TrainProgram` is to a decoder here, for a class of transformers: it takes the batches of a run's text."""

    compile_seconds = 0.0

    def step(  # type: ignore[override]
        self, micro_batches: list[tuple[Batch, Tensor]], lr: float, agrees: bool = True
    ) -> StepOutcome:
        """As of `TrainProgram`. Dropout is that of the step and of the rank's place among the data ranks."""
        before = BuffersBefore(self.module)
        key = micro_batches[0][0].dropout_key or 0
        torch.manual_seed((key + self.comms.index(REPLICA + DATA)) % (1 << 63))
        pairs = [(batch.ids, targets) for batch, targets in micro_batches]
        outcome = self.train(self._worker(token_loss, pairs), lr, agrees)
        if outcome.skipped:
            before.restore()
        return outcome

    def evaluate(self, batch: Batch, targets: Tensor) -> tuple[float, int]:
        """As of `TrainProgram`."""
        pair, sums = (batch.ids, targets), torch.zeros(2, dtype=torch.float64, device=self.device)
        self.module.eval()
        with torch.no_grad():
            if self.messages is not None:
                result = self.messages.pass_through(partial(token_loss, self.run, pair), {})
            else:
                self.engine.begin_evaluation()
                result = token_loss(self.run, pair)
        self.module.train()
        if result is not None:
            sums[0], sums[1] = result
        with self.comms.in_phase("loss"):
            self.comms.all_reduce(sums, DATA + PP if self.messages is not None else DATA, "validation")
        loss, count = sums.tolist()
        return loss, int(count)


class ClassRun(TrainingRun):
    """A rank's part in such a run."""

    program: ClassProgram  # type: ignore[assignment]

    def subject_of_run(self) -> Model:
        config = self.config
        self._model = ClassModel.of(config.model)
        # A process of a job cannot look for a plan.
        self._split = self._model.divided(config.layout, config.class_plan, config.class_parts)
        return self._split.described.blueprint

    def _program(self, plan: UnitPlan, folder: Path, kept: Kept | None) -> ClassProgram:  # type: ignore[override]
        config, module = self.config, self._split.module
        values: Values = MetaValues(module, config.seed, self._model)
        if config.weights and (config.model.lora or not config.resume):
            self.pulse.work(f"the reading of {config.weights}")
            module = self._model.pretrained(Path(config.weights))
            values = values_of({name: parameter.detach() for name, parameter in module.named_parameters()})
        if config.layout.precision == "fp64":
            use_exact_products(module)
        place_buffers(module, config.layout, values, self.device)
        module.train()
        return ClassProgram(
            module, self._split.described, plan, self.comms, config.optimizer, values, self.device, folder, kept
        )  # fmt: skip

    def start_from_weights(self) -> None:
        """Its weights were there when the program was made."""

    def _restored(self, checkpoint: Path) -> Position:
        source = Checkpoint.open(checkpoint)
        at = restore(self.program, source, stored_shapes(self.program.module))
        restore_buffers(self.program.module, source)
        restore_missed(self.program, source)
        return at

    def saver_options(self) -> dict[str, Any]:
        blueprint = self._split.described.blueprint
        return {"about": {**super().saver_options()["about"], "blueprint": blueprint.to_json()},
                "others": partial(written, self.program)}  # fmt: skip


def planned(config: TrainConfig) -> TrainConfig:
    """The configuration with the plan by which a model's class is divided. Raises `UserError` for what it cannot do."""
    layout, model = config.layout, ClassModel.of(config.model)
    if config.save_async:
        raise UserError(
            f"{model.name}: its checkpoints have buffers, which are written at once: leave out --save-async"
        )
    split = model.split(layout, config.workload.seq)
    check_described(split.described.blueprint, layout, config.workload.micro_batches(layout))
    check_head(model, split)
    if config.adapters and not config.resume:
        from shardwise.checkpoint.huggingface import PeftAdapters

        PeftAdapters.open(Path(config.adapters), config.model, split.described.blueprint)
    plan = None if split.plan is None else dict(split.plan)
    return replace(config, class_plan=plan, class_parts=None if split.parts is None else tuple(split.parts))


def check_head(model: ClassModel, split: ClassSplit) -> None:
    """Raise `UserError` for a class that does not tell the next token of a text."""
    if model.config.is_encoder_decoder:
        raise UserError(f"{model.name}: {model.kind.__name__} is an encoder with a decoder, and a text has no pairs")
    if split.module.get_output_embeddings() is None:  # type: ignore[operator]
        raise UserError(
            f"{model.name}: {model.kind.__name__} has no logits of the next token, so there is no loss: name the class "
            "with a head in architectures"
        )
    if model.attends_to_later_tokens(split.module):
        raise UserError(
            f"{model.name}: {model.kind.__name__} attends to later tokens, so it cannot learn the next one: set "
            "is_decoder in its configuration"
        )


def traced(config: TrainConfig) -> Blueprint:
    """The model as predictions read it. Raises `UserError` where it cannot be traced."""
    layout, model = config.layout, ClassModel.of(config.model)
    split = model.divided(layout, config.class_plan, config.class_parts)
    rows = torch.zeros(layout.micro, config.workload.seq, dtype=torch.int64)
    return trace(
        split.module, (rows, rows), split.plan, loss=token_loss, parts=split.parts, tp=[layout.tp],
        precisions=[layout.precision],
    )  # fmt: skip
