"""A rank's part in a run of a model by its class of transformers: the trainer's, with another program."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.checkpoint import Checkpoint
from shardwise.decoder import Batch
from shardwise.errors import LayoutError, UserError
from shardwise.layout.axes import DATA, DP, PP, REPLICA
from shardwise.layout.layout import traced_cut
from shardwise.layout.modules import check_described
from shardwise.layout.units import UnitPlan
from shardwise.model.blueprint import Blueprint
from shardwise.model.parameters import Model
from shardwise.report.files import write_whole
from shardwise.runtime.checkpointing import Position
from shardwise.runtime.job.batches import Batches
from shardwise.runtime.job.trainer import TrainingRun
from shardwise.runtime.module.buffers import BuffersBefore, restore_module, written
from shardwise.runtime.module.class_model import ClassModel, ClassSplit
from shardwise.runtime.module.experts import use_exact_products
from shardwise.runtime.module.initial import MetaValues, place_buffers, values_in
from shardwise.runtime.module.losses import Loss, LossRows, TokenRows, loss_of, margins, token_loss
from shardwise.runtime.module.program import ModuleProgram
from shardwise.runtime.module.trace import trace, traced_modes
from shardwise.runtime.offload.file import Kept
from shardwise.runtime.pipeline.program import StepOutcome
from shardwise.runtime.zero.flat_unit import Values

if TYPE_CHECKING:
    from shardwise.runtime.job.config import TrainConfig

REFERENCE = "reference.json"
"""File of a run: by split, log p(chosen) - log p(rejected) of the reference."""


class ClassProgram(ModuleProgram):
    """What `TrainProgram` is to a decoder here, for a class of transformers: it takes the batches of a run's text."""

    compile_seconds = None  # blocks are compiled where they first run
    minimized: Loss = staticmethod(token_loss)

    def step(  # type: ignore[override]
        self, micro_batches: list[tuple[Batch, Tensor]], lr: float, agrees: bool = True
    ) -> StepOutcome:
        """As of `TrainProgram`. Dropout is that of the step and of the rank's place among the data ranks."""
        before = BuffersBefore(self.module)
        key = micro_batches[0][0].dropout_key or 0
        torch.manual_seed((key + self.comms.index(REPLICA + DATA)) % (1 << 63))
        outcome = self.train(self.worker(self.minimized, [rows_of(*pair) for pair in micro_batches]), lr, agrees)
        if outcome.skipped:
            before.restore()
        return outcome

    def evaluate(self, batch: Batch, targets: Tensor) -> tuple[float, int]:
        """As of `TrainProgram`."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        if (result := self.judge(self.minimized, rows_of(batch, targets))) is not None:
            sums[0], sums[1] = result
        loss, count = self._over_ranks(sums, "validation").tolist()
        return loss, int(count)

    def judge(self, function: Callable[[Any, LossRows], Any], rows: LossRows) -> Any:
        """A function of a forward pass and its rows, without gradients and dropout; under a pipeline None but on the
        last stage."""
        self.module.eval()
        with torch.no_grad():
            if self.messages is not None:
                result = self.messages.pass_through(partial(function, self.run, rows), {})
            else:
                self.engine.begin_evaluation()
                result = function(self.run, rows)
        self.module.train()
        return result

    def reference(self, batches: Batches) -> Tensor:
        """log p(chosen) - log p(rejected) of every pair of a sampler by the model as it is, fp64 [pairs]. All ranks
        call it together."""
        micro, place, ranks = self.plan.layout.micro, batches.data_rank, self.comms.size(DP)
        pairs: Any = batches.sampler
        made = torch.zeros(pairs.windows, dtype=torch.float64, device=self.device)
        for first in range(0, pairs.windows, ranks * micro):
            self.comms.pulse.work("the reference pass")
            numbers = np.arange(first + place * micro, first + (place + 1) * micro)
            rows = rows_of(*batches.micro_batch(pairs.rows(numbers % pairs.windows), numbers, None))
            result, mine = self.judge(margins, rows), numbers < pairs.windows
            if result is not None:
                made[numbers[mine]] = result.double()[torch.from_numpy(mine)]
        return self._over_ranks(made, "reference")

    def _over_ranks(self, sums: Tensor, what: str) -> Tensor:
        with self.comms.in_phase("loss"):
            self.comms.all_reduce(sums, DATA + PP if self.messages is not None else DATA, what)
        return sums


def rows_of(batch: Batch, targets: Tensor) -> LossRows:
    """A micro-batch as its loss takes it."""
    return LossRows(batch.ids, targets, None if batch.documents is None else batch.positions, batch.reference)


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
            values = values_in(module)
        if config.layout.precision == "fp64":
            use_exact_products(module)
        place_buffers(module, config.layout, values, self.device)
        module.train()
        program = ClassProgram(
            module, self._split.described, plan, self.comms, config.optimizer, values, self.device, folder, kept
        )  # fmt: skip
        program.minimized = loss_of(config.minimized, self._teacher())
        return program

    def _teacher(self) -> nn.Module | None:
        """The second model of a distillation, whole, in the layout's precision."""
        if not (path := self.config.minimized.teacher):
            return None
        self.pulse.work(f"the reading of {path}")
        data = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
        teacher = ClassModel(data, path).pretrained(Path(path)).requires_grad_(False).eval().to(self.device)
        if self.config.layout.precision == "fp64":
            use_exact_products(teacher)
        for parameter in teacher.parameters():  # and no buffer: rotations need more bits
            parameter.data = parameter.data.to(getattr(torch, self.config.layout.dtype))
        return teacher

    def _open_corpus(self, plan: UnitPlan) -> None:
        """With the reference of preference pairs: by the model of the first step, without adapters. A resumed run,
        whose weights have changed since, has it from its directory. Raises `UserError` where that is not there."""
        super()._open_corpus(plan)
        config = self.config
        if config.minimized.kind != "dpo":
            return
        self.entropy, about = math.log(2), f"{config.corpus_fingerprint} {config.workload.seq}"
        files = [Path(config.out), *([Path(config.resume).parents[1]] if config.resume else [])]
        kept = kept_reference(files, about, self.rank)
        if kept is None and config.resume and not config.model.lora:
            raise UserError(
                f"{files[-1]} has no reference of these pairs, and the weights of the first step are gone: export the "
                "checkpoint, and start a new run from it (--weights)"
            )
        made = kept or {split: self.program.reference(one).tolist() for split, one in self.batches.items()}
        self._reference = made | {"about": about}
        for split, batches in self.batches.items():
            pairs: Any = batches.sampler
            pairs.reference = np.array(made[split])

    def _micro_batches(self, step: int, key: int) -> list[tuple[Batch, Tensor]]:
        """As of `TrainingRun`. Shapes of messages are known before a step, which may be the first one, is measured."""
        made = super()._micro_batches(step, key)
        self.program.learn_shapes(self.program.minimized, [rows_of(*pair) for pair in made])
        return made

    def train(self) -> dict[str, Any]:
        """As of `TrainingRun`; the reference is kept first."""
        if self.record and self.config.minimized.kind == "dpo":
            write_whole(Path(self.config.out, REFERENCE), json.dumps(self._reference), "reference")
        return super().train()

    def start_from_weights(self) -> None:
        """Its weights were there when the program was made."""

    def _restored(self, checkpoint: Path) -> Position:
        return restore_module(self.program, Checkpoint.open(checkpoint))

    def saver_options(self) -> dict[str, Any]:
        blueprint = self._split.described.blueprint
        return {"about": {**super().saver_options()["about"], "blueprint": blueprint.to_json()},
                "others": partial(written, self.program)}  # fmt: skip


def kept_reference(folders: Sequence[Path], about: str, rank: int) -> dict[str, Any] | None:
    """References that an earlier start of a run has kept, of these pairs; None without them. Rank 0 reads for all: a
    folder may be on its node alone, and ranks that find nothing would compute without the others."""
    kept: list[dict[str, Any] | None] = [None]
    for folder in folders if rank == 0 else ():
        with suppress(OSError, ValueError, KeyError, TypeError):
            made = json.loads((folder / REFERENCE).read_bytes())
            kept[0] = kept[0] or (dict(made) if made["about"] == about else None)
    dist.broadcast_object_list(kept, src=0)
    return kept[0]


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
    if config.workload.isolate_documents and not model.isolates_documents(layout):
        raise LayoutError(
            f"{model.name}: its class of transformers attends across the documents of a packed sequence: leave out "
            "--isolate-documents"
        )
    return replace(config, **split.chosen)


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
    packed, dpo = config.workload.isolate_documents, config.minimized.kind == "dpo"
    return trace(
        split.module, TokenRows(config.workload.seq, packed, layout.micro, dpo), split.plan,
        loss=loss_of(config.minimized), parts=split.parts, tp=[layout.tp], precisions=[layout.precision],
        cuts=[traced_cut(layout)], modes=traced_modes(layout), single=layout.micro == 1,
    )  # fmt: skip
