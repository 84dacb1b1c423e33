"""The stages of a split decoder on one rank: their forward passes, whose backwards tell the engine where they are.

Without a pipeline there is one stage, the whole decoder.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.decoder import Batch, Decoder
from shardwise.layout.units import UnitPlan
from shardwise.ops.gradients import WeightGradients
from shardwise.ops.recompute import recompute
from shardwise.runtime.offload.activations import SavedTensors, storages
from shardwise.runtime.offload.file import OffloadFile
from shardwise.runtime.pipeline.program import PartBoundary, Runner
from shardwise.runtime.tensor.loss import loss_form, summed_cross_entropy
from shardwise.runtime.tensor.lowering import lower_for_training, vocabulary_range
from shardwise.runtime.transport.comms import Comms


class _WithGradient(torch.autograd.Function):
    """Identity that gives a tensor without gradient a backward pass, in which nothing is computed. anchor: a number
    that requires a gradient, and gets none."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class _RecomputeFromInput(torch.autograd.Function):
    """All blocks of a stage, saving only the first one's input: each block's backward starts with a run up to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stages: StageRunner, blocks: list[tuple[str, nn.Module]], batch: Batch) -> Tensor:
        ctx.stages, ctx.blocks, ctx.batch = stages, blocks, batch
        ctx.save_for_backward(x)
        for name, block in blocks:
            stages.engine.use_unit("forward", name)
            x = block(x, batch)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (start,) = ctx.saved_tensors
        stages, blocks, batch, grad = ctx.stages, ctx.blocks, ctx.batch, grads[0]
        for index in reversed(range(len(blocks))):
            x = start
            for name, block in blocks[:index]:
                stages.engine.use_unit("recompute", name)
                x = block(x, batch)
            name, block = blocks[index]
            stages.engine.use_unit("backward", name)
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y = block(x, batch)
            torch.autograd.backward(y, grad)
            del y
            stages.engine.finish_backward(name)
            assert x.grad is not None
            grad = x.grad
        return grad, None, None, None


class StageRunner(Runner):
    """A decoder cut and bound to its buffers, whose stages on this rank can be computed.

    device: where the buffers are. file: of what is offloaded to disk.
    """

    def __init__(self, plan: UnitPlan, comms: Comms, device: torch.device, file: OffloadFile | None = None) -> None:
        with torch.device("meta"):
            self.decoder = Decoder(plan.model)
        weights = WeightGradients(at_once=plan.of_kind("head"))
        writing: set[nn.Module] = set()
        if plan.trains:
            writing = lower_for_training(self.decoder, plan, comms, weights, device)
        super().__init__(self.decoder, plan, comms, device, weights, writing, file)
        self.vocabulary = vocabulary_range(plan)
        self.loss_form = loss_form(device, plan.model.logit_softcap)
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self.parts = {name: part for name, part in self.decoder.parts() if name in plan.parts}

    def infer(self, stage: int, x: Tensor | None, batch: Batch) -> Tensor:
        """The forward pass of a stage, for which no backward will come."""
        for name in self.plan.stages[stage]:
            self.engine.use_unit("forward", name)
            x = self.parts[name](x, batch)
        assert x is not None
        return x

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The summed loss of the valid tokens of a micro-batch."""
        with self.comms.in_phase("loss"):
            cap = self.plan.model.logit_softcap
            return summed_cross_entropy(logits, targets, *self.vocabulary, self.comms, cap, self.loss_form)

    def forward(self, stage: int, x: Tensor | None, batch: Batch) -> Tensor:
        """The forward pass of a stage, from what the stage before has sent (None for the first) to its own output.

        Its backward visits the parts of the stage; that of the embedding is over when the whole backward is.
        """
        blocks = [(name, self.parts[name]) for name in self.plan.local.blocks(stage)]
        saved: SavedTensors | None = None
        for name in self.plan.stages[stage]:
            from_input, is_block = self.plan.layout.recompute == "input", self.plan.blueprint.kind(name) == "block"
            if self.offloaded is not None and is_block and (not from_input or saved is None):
                saved = self.offloaded.block(name, partial(storages, batch), saved)
            if from_input and is_block:
                if name == blocks[0][0]:
                    x = self._blocks_from_input(x, blocks, batch, saved)
                continue
            x = self._part(name, self.parts[name], x, batch, saved if is_block else None)
        assert x is not None
        return x

    def _blocks_from_input(
        self, x: Tensor | None, blocks: list[tuple[str, nn.Module]], batch: Batch, saved: SavedTensors | None
    ) -> Tensor:
        with nullcontext() if saved is None else saved.saving():
            y: Tensor = _RecomputeFromInput.apply(x, self, blocks, batch)  # type: ignore[no-untyped-call]
        if saved is not None:
            assert y.grad_fn is not None and x is not None
            moved = saved
            moved.saved()
            y.grad_fn.register_prehook(lambda grads: moved.restore(self.device))
            x.register_hook(lambda grad: moved.drop())
        return y

    def _part(self, name: str, part: nn.Module, x: Tensor | None, batch: Batch, saved: SavedTensors | None) -> Tensor:
        engine = self.engine

        def finish() -> None:
            if saved is not None:
                saved.drop()
            engine.finish_backward(name)

        def begin() -> None:
            engine.use_unit("backward", name)
            if saved is not None:
                saved.restore(self.device)

        if x is not None and x.is_leaf:
            (x,) = PartBoundary.apply(finish, x)  # type: ignore[no-untyped-call]
        elif x is not None:
            # Runs when the gradient of the part's input is complete, before the part that made it goes backward.
            x.register_hook(lambda grad: finish())
        engine.use_unit("forward", name)
        with nullcontext() if saved is None else saved.saving():
            again = self.plan.layout.recompute == "full" and self.plan.blueprint.kind(name) == "block"
            if again and not getattr(part, "recomputes", False):  # a compiled block may do so itself
                assert x is not None
                y = recompute(lambda x: part(x, batch), x)
            else:
                y = part(x, batch)
        if saved is not None:
            saved.saved()
        if not y.requires_grad:  # a frozen embedding
            y = _WithGradient.apply(self._anchor, y)  # type: ignore[no-untyped-call]
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(lambda grads: begin())
        return y

    def end_backward(self, stage: int) -> None:
        """As of `Runner`: that of the embedding has no input whose gradient would tell."""
        if stage == 0:
            self.engine.finish_backward(self.plan.stages[0][0])
