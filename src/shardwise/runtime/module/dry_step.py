"""A user's module as a dry run takes it: built by its code, on fake tensors, as any rank of any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.context import cuts_sequences
from shardwise.layout.units import UnitPlan, unit_plan
from shardwise.model.blueprint import Blueprint
from shardwise.model.trace import Trace
from shardwise.runtime.module.chain import Chain, find_chain
from shardwise.runtime.module.class_model import ClassModel
from shardwise.runtime.module.context import check_positions, check_tokens
from shardwise.runtime.module.describe import describe, find_blocks
from shardwise.runtime.module.fake_step import default_loss, fake_copy, fake_order, fake_program
from shardwise.runtime.module.initial import is_meta
from shardwise.runtime.module.inputs import in_dtype, with_rows
from shardwise.runtime.module.losses import TokenRows, token_loss
from shardwise.runtime.module.program import LossFunction, ModuleProgram
from shardwise.runtime.module.stages import ModuleStages
from shardwise.runtime.module.verify import FromFile
from shardwise.runtime.transport.comms import Comms


@dataclass(frozen=True)
class ModuleSource:
    """How to build a module and a micro-batch of a layout; picklable. Fields as of `trace`."""

    layout: Layout
    build: Callable[[], nn.Module]
    example: Callable[[], Any]
    loss: LossFunction | FromFile = default_loss
    plan: Mapping[str, str] | None = None
    blocks: Sequence[str] | None = None
    parts: Sequence[str] | None = None

    @classmethod
    def of_trace(cls, trace: Trace | None, layout: Layout, workload: Workload) -> ModuleSource:
        """The code that a trace names. Raises `UserError` where it names none, or what is not there."""
        if trace is None or (source := trace.source) is None:
            raise UserError(
                "this file does not name the code of its module, which a dry run builds: make it with `shardwise trace`"
            )
        named = None if source.plan is None else dict(source.plan), source.blocks, source.parts
        if source.config is not None:
            model = ClassModel(source.config, str(source.config.get("model_type")))
            return cls(layout, model.blank, TokenRows(workload.seq, workload.isolate_documents), token_loss, *named)
        if workload.seq != trace.seq:
            at = f"{source.example} in {source.file}"
            raise UserError(f"{at} has rows of {trace.seq} elements, not {workload.seq}: choose --seq {trace.seq}")
        if not Path(source.file).is_file():
            raise UserError(f"the trace is of {source.file}, which is not there: trace it again, or move both together")
        build = FromFile.parse(f"{source.file}:{source.build}")
        loss = FromFile(build.path, source.loss) if source.loss else default_loss
        return cls(layout, build, FromFile(build.path, source.example), loss, *named)

    @classmethod
    def of_class(cls, model: ClassModel, layout: Layout, workload: Workload) -> tuple[Blueprint, ModuleSource]:
        """(description, source) of a model by its class of transformers. Raises `UserError` for a layout that it cannot
        have."""
        split = model.split(layout, workload.seq)
        example = TokenRows(workload.seq, workload.isolate_documents)
        return split.described.blueprint, cls(layout, model.blank, example, token_loss, split.plan, None, split.parts)

    @property
    def loss_function(self) -> LossFunction:
        found: LossFunction = self.loss.loaded() if isinstance(self.loss, FromFile) else self.loss
        return found


@dataclass
class DryModule:
    """A module under a layout, before it is bound to a rank."""

    source: ModuleSource
    fake: FakeTensorMode

    def __post_init__(self) -> None:
        source, self.layout = self.source, self.source.layout
        self.module, self.example, self.loss = source.build(), source.example(), source.loss_function
        if cuts_sequences(self.layout):
            check_positions(self.module)
            if self.loss is default_loss and not is_meta(self.module):
                check_tokens(self.module, self.example)
        blocks = find_blocks(self.module, source.blocks)
        self.chain: Chain | None = (
            find_chain(self.module, source.parts, blocks) if self.layout.stage_count > 1 else None
        )
        if blocks and self.chain is None:
            blocks = fake_order(self.module, self.fake, blocks, self.example, 2, self.loss)
        self.described = describe(self.module, self.layout, source.plan, blocks, self.chain)

    def planned(self, plan: UnitPlan, rank: int) -> UnitPlan:
        """A plan of the same step, of the parameters that the module has. Raises `UserError` where the plan has others:
        the code has changed."""
        there, traced = (
            sorted((p.name, p.numel, p.frozen) for p in of.parameters())
            for of in (self.described.blueprint, plan.blueprint)
        )
        if there != traced:
            raise UserError("its code has changed since it was traced: trace it again")
        return unit_plan(self.described.blueprint, self.layout, plan.workload, rank=rank, backend=plan.backend)

    def program(self, plan: UnitPlan, comms: Comms) -> tuple[ModuleProgram, list[Any]]:
        """The rank's program and its micro-batches. Call it inside of the fake mode."""
        program = fake_program(fake_copy(self.module, self.fake), self.described, plan, comms)
        rows = plan.tokens // plan.sequence.local
        batches = [program.of_rows(with_rows(self.example, rows)) for _ in range(plan.micro_batches)]
        if program.messages is not None:
            assert program.stages is not None
            program.messages.know(batches[0], self._outputs(program.stages, batches[0]))
        return program, batches

    def step(self, program: ModuleProgram, batches: Sequence[Any]) -> None:
        """One step."""
        program.train(program.worker(self.loss, batches), 1e-3)

    def _outputs(self, stages: ModuleStages, batch: Any) -> dict[int, Tensor]:
        """Stage -> what it hands on, on the meta device: of a forward pass of the whole module."""
        dtype, made = getattr(torch, self.layout.dtype), {}
        blank, blocks = fake_copy(self.module, self.fake, dtype), stages.chain.blocks

        def note(stage: int, *called: Any) -> None:
            _, args, kwargs, out = called
            handed = out if stages.blocks[stage][1] else next(iter((*args, *kwargs.values())))
            made[stage] = torch.empty_like(handed, device="meta")

        for stage, (_, stop) in enumerate(stages.blocks[:-1]):
            block = blank.get_submodule(blocks[max(stop - 1, 0)])
            block.register_forward_hook(partial(note, stage), with_kwargs=True)
        with torch.no_grad():
            self.loss(blank, in_dtype(batch, dtype))
        return made
