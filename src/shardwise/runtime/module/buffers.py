"""Contents of a user's module's checkpoints beside parameters, by name and whatever the layout: persistent buffers, and
how many updates left a parameter alone.

The first rank that computes with a buffer writes it, so that statistics of a rank's own rows are that rank's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.dtypes import CODES
from shardwise.checkpoint.names import unwrapped
from shardwise.errors import UserError
from shardwise.layout.axes import PP, REPLICA, STAGE
from shardwise.runtime.checkpointing import Position, restore
from shardwise.runtime.module.program import ModuleProgram

KIND = "buffer"
"""Kind of stored tensor."""
MISSED = "missed"
"""Kind of stored tensor: updates without a gradient for a parameter, where there are any."""


class BuffersBefore:
    """The buffers of a module as they are before a step, such as a batch norm's statistics."""

    def __init__(self, module: nn.Module) -> None:
        self._values = [
            (child, leaf, buffer, buffer.clone())
            for child in module.modules()
            for leaf, buffer in child._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]

    def restore(self) -> None:
        """Undo what the step has written, in place or by other tensors."""
        for child, leaf, buffer, values in self._values:
            child._buffers[leaf] = buffer.copy_(values)


def persistent(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module's state, by name, but for empty ones."""
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept and buffer.numel()}


def stored_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Stored name -> shape of every buffer, and of every number of missed updates."""
    shapes = {_key(name): tuple(stored(name, buffer).shape) for name, buffer in persistent(module).items()}
    return shapes | {_key(name, MISSED): (1,) for name, _ in module.named_parameters()}


def _key(name: str, kind: str = KIND) -> str:
    return f"{kind}/{unwrapped(name)}"


def stored(name: str, buffer: Tensor) -> Tensor:
    """A buffer as a checkpoint has it: a vector or matrix of floating-point numbers. Raises `UserError` for integers
    that these cannot hold."""
    real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    wide = real if str(real.dtype).removeprefix("torch.") in CODES else real.double()
    if not torch.equal(wide.to(real.dtype), real):
        raise UserError(f"the buffer {name} has integers of more than 53 bits, which checkpoints do not store")
    return wide.flatten(0, -2) if wide.dim() > 2 else wide.reshape(-1) if wide.dim() == 0 else wide


def written(program: ModuleProgram) -> dict[str, Tensor]:
    """Stored name -> values of the buffers, and of missed updates, that this rank writes."""
    comms, stages = program.comms, program.stages
    if comms.index(REPLICA + STAGE):
        return {}

    def here(name: str) -> bool:
        home = stages.chain.home(name) if stages is not None else ""
        return home in program.plan.parts if home else comms.index(PP) == 0

    buffers = persistent(program.module).items()
    missed = program.optimizer.missed.items()
    return {_key(name): stored(name, buffer) for name, buffer in buffers if here(name)} | {
        _key(name, MISSED): torch.tensor([float(count)], dtype=torch.float64) for name, count in missed if here(name)
    }


def restore_module(program: ModuleProgram, checkpoint: Checkpoint) -> Position:
    """As of `restore`, with buffers, and with how many updates have left each parameter alone."""
    at = restore(program, checkpoint, stored_shapes(program.module))
    restore_buffers(program.module, checkpoint)
    missed = program.optimizer.missed
    missed.clear()
    for name, _ in program.module.named_parameters():
        if (key := _key(name, MISSED)) in checkpoint.tensors:
            missed[name] = int(checkpoint.read(key, dtype="float64")[0])
    return at


def restore_buffers(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Set all buffers that a checkpoint has."""
    for name, buffer in persistent(module).items():
        if (key := _key(name)) not in checkpoint.tensors:
            continue
        dtype = "float32" if checkpoint.tensors[key].dtype == "bfloat16" else checkpoint.tensors[key].dtype
        values = torch.from_numpy(np.ascontiguousarray(checkpoint.read(key, dtype=dtype)))
        target = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        target.copy_(values.view(target.shape))
