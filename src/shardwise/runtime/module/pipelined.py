"""The computation of a step of a user's module, and the messages between the stages of its pipeline.

Messages have the shapes of what the module makes of the batch. The first batch of each kind passes through all stages
once without gradients, so that every rank knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from shardwise.layout.axes import PP
from shardwise.runtime.module.stages import LARGEST, ModuleStages
from shardwise.runtime.pipeline.program import StepWorker

if TYPE_CHECKING:
    from shardwise.runtime.module.parts import PartRunner

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""dtypes of tensors between stages, by their codes in a header."""
Loss = Callable[[Any], tuple[Tensor, Tensor]]
"""Micro-batch -> (summed loss, tokens), by the whole module's forward."""
Kind = tuple[tuple[torch.Size, torch.dtype], ...]
"""Shapes and dtypes of a batch's tensors."""


def kind_of(batch: Any) -> Kind:
    """Two batches of one kind have messages of the same shapes."""
    leaves = _pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))


class Messages:
    """Shapes of the tensors between stages, by kind of batch."""

    def __init__(self, runner: PartRunner, stages: ModuleStages) -> None:
        self.runner, self.stages = runner, stages
        self._outputs: dict[Kind, dict[int, Tensor]] = {}
        """Kind -> stage -> its output on the meta device, for outputs that this rank makes or takes."""

    def buffer(self, batch: Any, stage: int) -> Tensor:
        """Memory for a stage's output, or its gradient."""
        return torch.empty_like(self._outputs[kind_of(batch)][stage], device=self.runner.device)

    def know(self, batch: Any, outputs: dict[int, Tensor]) -> None:
        """The stages' outputs for batches of this kind, on the meta device."""
        self._outputs[kind_of(batch)] = outputs

    def learn(self, loss: Loss, batches: Sequence[Any]) -> None:
        """Know the shapes for these batches. Buffers and random numbers are afterwards as they were."""
        for batch in batches:
            if (kind := kind_of(batch)) in self._outputs:
                continue
            outputs: dict[int, Tensor] = {}
            buffers = [(buffer, buffer.clone()) for buffer in self.runner.module.buffers()]
            devices = [self.runner.device] if self.runner.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                self.pass_through(lambda batch=batch: loss(batch), outputs, ends=False)  # type: ignore[misc]
            for buffer, before in buffers:
                buffer.copy_(before)
            self._outputs[kind] = outputs

    def pass_through(self, forward: Callable[[], Any], outputs: dict[int, Tensor], ends: bool = True) -> Any:
        """One forward pass over all stages without gradients; its result on ranks with the last one, else None. ends:
        whether the last stage computes. outputs: takes the stages' outputs on the meta device."""
        comms, where, x, result = self.runner.comms, self.stages.where, None, None
        mine = comms.index(PP)
        with torch.no_grad():
            for stage, rank in enumerate(where):
                if stage and mine in (where[stage - 1], rank):
                    x = self._handed_on(x, where[stage - 1], rank)
                    outputs[stage - 1] = torch.empty_like(x, device="meta")
                if rank == mine and (ends or stage < self.stages.last):
                    result = x = self.runner.run_stage(stage, x, forward)
        return result if ends and mine == where[-1] else None

    def _handed_on(self, x: Tensor | None, source: int, target: int) -> Tensor:
        """A tensor from one rank of the pipeline to another, after a header with its shape."""
        comms, device = self.runner.comms, self.runner.device
        header = torch.zeros(LARGEST + 2, dtype=torch.int64, device=device)
        if source == target:
            assert x is not None
            return x
        if comms.index(PP) == source:
            assert x is not None
            x = x.contiguous()
            header[: x.dim() + 2] = torch.tensor([DTYPES.index(x.dtype), x.dim(), *x.shape])
            for message in (header, x):
                comms.send(message, PP, target, "messages").wait()
            return x
        comms.receive(header, PP, source, "messages").wait()
        code, dims, *shape = header.tolist()
        out = torch.empty(shape[:dims], dtype=DTYPES[code], device=device)
        comms.receive(out, PP, source, "messages").wait()
        return out


class ModuleWorker(StepWorker):
    """The computation of a user's module in one step, stage by stage. loss: of a micro-batch, by the module's own
    forward.

    A micro-batch's tokens are known after its forward pass, those of later ones only then. So gradients are scaled by
    those of the first one, as if the others had as many, and once more at the end where they had not.
    """

    runner: PartRunner

    def __init__(self, runner: PartRunner, messages: Messages | None, loss: Loss, batches: Sequence[Any]) -> None:
        super().__init__(runner, batches)
        self.messages, self.loss = messages, loss
        self.first: float | None = None
        """Tokens of the first micro-batch on all data ranks; None on ranks without the last stage."""
        self.later = torch.zeros((), dtype=torch.float64, device=runner.device)

    def buffer(self, way: str, stage: int, micro: int) -> Tensor:
        """As of `Worker`."""
        assert self.messages is not None
        return self.messages.buffer(self.batches[micro], stage - 1 if way == "F" else stage)

    def compute(self, stage: int, micro: int, x: Tensor | None) -> Tensor:
        """As of `StepWorker`."""
        result = self.runner.run_stage(stage, x, lambda: self.loss(self.batches[micro]))
        if stage < self.last:
            return result  # type: ignore[no-any-return]
        loss: Tensor
        loss, count = result
        if self.first is None:
            self.first = self.runner.over_data(count)
            self.tokens = self.first * len(self.batches) or 1
        else:
            self.later += count
        return loss

    def count_tokens(self) -> float:
        """As of `StepWorker`."""
        comms, tokens = self.runner.comms, 0.0
        piped = self.runner.plan.layout.pp > 1
        if self.first is not None:
            tokens = self.first + (self.runner.over_data(self.later) if piped or len(self.batches) > 1 else 0.0)
        if piped:
            numbers = torch.zeros(2, dtype=torch.float64, device=self.runner.device)
            if self.first is not None:
                numbers[0], numbers[1] = self.tokens, tokens
            with comms.in_phase("loss"):
                comms.all_reduce(numbers, PP, "valid tokens")
            self.tokens, tokens = (comms.read(number) for number in numbers)
        if self.tokens != (tokens or 1):
            for flat in self.engine.trained:
                flat.grads_interval.mul_(self.tokens / (tokens or 1))
        return tokens
