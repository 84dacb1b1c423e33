"""One training step of a split decoder: forward and backward of every micro-batch, in the order of the plan.

Without a pipeline micro-batches come one after the other; with one, `pipeline.py` has the order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.decoder import Batch, Decoder
from shardwise.decoder.attention import CoreAttention
from shardwise.layout.units import UnitPlan
from shardwise.runtime.comms import Comms
from shardwise.runtime.config import OptimizerConfig
from shardwise.runtime.engine import Engine, Values
from shardwise.runtime.gradients import Product, WeightGradients
from shardwise.runtime.loss import IGNORED, summed_cross_entropy
from shardwise.runtime.optimizer import Optimizer
from shardwise.runtime.pipeline import evaluate, train
from shardwise.runtime.recompute import recompute, recompute_attention_cores
from shardwise.runtime.tensor_parallel import apply_tensor_parallel, vocabulary_range


class _AfterForward(torch.autograd.Function):
    """Identity at a part's output: its backward is the moment before the part's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, before_backward: Callable[[], None]) -> Tensor:
        ctx.before_backward = before_backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.before_backward()
        return grads[0], None


class _BeforeForward(torch.autograd.Function):
    """Identity at a part's input: its backward runs when every gradient inside the part has been accumulated.

    Autograd runs ready nodes latest-created first, and this one was created before all others of the part.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, after_backward: Callable[[], None]) -> Tensor:
        ctx.after_backward = after_backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.after_backward()
        return grads[0], None


class _RecomputeFromInput(torch.autograd.Function):
    """All blocks of a stage, saving only the first one's input: each block's backward starts with a run up to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, program: Program, blocks: list[tuple[str, nn.Module]], batch: Batch) -> Tensor:
        ctx.program, ctx.blocks, ctx.batch = program, blocks, batch
        ctx.save_for_backward(x)
        for name, block in blocks:
            program.engine.visit("forward", name)
            x = block(x, batch)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (start,) = ctx.saved_tensors
        program, blocks, batch, grad = ctx.program, ctx.blocks, ctx.batch, grads[0]
        for index in reversed(range(len(blocks))):
            x = start
            for name, block in blocks[:index]:
                program.engine.visit("recompute", name)
                x = block(x, batch)
            name, block = blocks[index]
            program.engine.visit("backward", name)
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y = block(x, batch)
            torch.autograd.backward(y, grad)
            del y
            program.engine.finish_backward(name)
            assert x.grad is not None
            grad = x.grad
        return grad, None, None, None


def no_moment(kept: list[Product]) -> None:
    """Nobody looks."""


class Program:
    """A decoder cut, bound to its buffers and ready to step. `values` gives the initial weights.

    decoder: built on the meta device; device: where the buffers live.
    """

    def __init__(
        self, plan: UnitPlan, comms: Comms, optimizer: OptimizerConfig, values: Values, device: torch.device
    ) -> None:
        with torch.device("meta"):
            self.decoder = Decoder(plan.model)
        self.plan, self.comms, self.device = plan, comms, device
        self.weights = WeightGradients()
        overwriting = apply_tensor_parallel(self.decoder, plan, comms, self.weights)
        for core in (module for module in self.decoder.modules() if isinstance(module, CoreAttention)):
            core.kind = plan.layout.attention
        if plan.layout.recompute == "selective":
            recompute_attention_cores(self.decoder)
        self.engine = Engine(self.decoder, plan, comms, device, overwriting, self.weights)
        self.optimizer = Optimizer(self.engine, comms, optimizer, values)
        with comms.in_phase("optimizer"):
            self.engine.publish()
        self.vocabulary = vocabulary_range(plan)
        self.parts = {name: part for name, part in self.decoder.parts() if name in plan.parts}
        self.moment: Callable[[list[Product]], object] = no_moment
        """Told whenever all that backward will need is there, or some of it has gone: at the end of a forward pass, and
        of every computation of a pipeline. kept: what is kept of backward passes whose weights come later."""
        self.compile_seconds = 0.0
        if plan.layout.compile == "block":
            from shardwise.runtime.compiling import compile_blocks  # brings in the compiler, which takes seconds

            comms.pulse.work("the compilation of the blocks")
            with self.engine.trying(plan.first_blocks[0]):
                self.compile_seconds = compile_blocks(self.decoder, plan, device)

    def step(self, micro_batches: list[tuple[Batch, Tensor]], lr: float) -> tuple[float, float, int]:
        """Train on one global batch. micro_batches: this rank's (batch, targets [B, S]).

        Returns (loss, gradient norm, valid tokens), the same numbers on every rank: the loss is the mean over the
        global batch's valid tokens.
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
        self.engine.finish_step()
        norm = self.optimizer.step(lr)
        self.engine.publish()
        if self.plan.schedule is None:
            with self.comms.in_phase("loss"):
                self.comms.all_reduce(total, "data", "loss")
        return self.comms.read(total) / max(1, tokens), norm, tokens

    def evaluate(self, batch: Batch, targets: Tensor) -> tuple[float, int]:
        """(summed loss, valid tokens) of one micro-batch on every data rank, summed over them; nothing is trained."""
        with torch.no_grad():
            tokens = self._count_valid([targets])
            if self.plan.layout.pp > 1:
                return self.comms.read(evaluate(self, batch, targets)), tokens
            self.engine.begin_evaluation()
            loss = self.loss(self.infer(0, None, batch.fresh()), targets).double()
            with self.comms.in_phase("loss"):
                self.comms.all_reduce(loss, "data", "loss")
        return self.comms.read(loss), tokens

    def infer(self, stage: int, x: Tensor | None, batch: Batch) -> Tensor:
        """The forward pass of a stage, for which no backward will come."""
        for name in self.plan.stages[stage]:
            self.engine.visit("forward", name)
            x = self.parts[name](x, batch)
        assert x is not None
        return x

    def _count_valid(self, targets: list[Tensor]) -> int:
        count = torch.zeros(1, dtype=torch.int64, device=self.device)
        for each in targets:
            count += (each != IGNORED).sum()
        with self.comms.in_phase("loss"):
            self.comms.all_reduce(count, "data", "valid tokens")
        return int(self.comms.read(count))

    def _train(self, batch: Batch, targets: Tensor, tokens: int) -> Tensor:
        loss = self.loss(self.forward(0, None, batch), targets)
        self.moment([])
        (loss / max(1, tokens)).backward()
        self.engine.finish_backward("embedding")
        return loss.detach()

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The summed loss of the valid tokens of a micro-batch."""
        with self.comms.in_phase("loss"):
            return summed_cross_entropy(logits, targets, *self.vocabulary, self.comms)

    def forward(self, stage: int, x: Tensor | None, batch: Batch) -> Tensor:
        """The forward pass of a stage, from what the stage before has sent (None for the first) to its own output.

        Its backward visits the parts of the stage; that of the embedding is over when the whole backward is.
        """
        blocks = [(name, self.parts[name]) for name in self.plan.blocks(stage)]
        for name in self.plan.stages[stage]:
            if self.plan.layout.recompute == "input" and name.startswith("blocks."):
                if name == blocks[0][0]:
                    x = _RecomputeFromInput.apply(x, self, blocks, batch)  # type: ignore[no-untyped-call]
                continue
            x = self._part(name, self.parts[name], x, batch)
        assert x is not None
        return x

    def _part(self, name: str, part: nn.Module, x: Tensor | None, batch: Batch) -> Tensor:
        engine = self.engine
        if x is not None:
            x = _BeforeForward.apply(x, lambda: engine.finish_backward(name))  # type: ignore[no-untyped-call]
        engine.visit("forward", name)
        if self.plan.layout.recompute == "full" and name.startswith("blocks."):
            assert x is not None
            y = recompute(lambda x: part(x, batch), x)
        else:
            y = part(x, batch)
        out: Tensor = _AfterForward.apply(y, lambda: engine.visit("backward", name))  # type: ignore[no-untyped-call]
        return out
