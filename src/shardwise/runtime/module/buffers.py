"""Persistent buffers of a user's module in checkpoints: whole, by their names, whatever the layout.

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
from shardwise.layout.axes import PP, STAGE
from shardwise.runtime.module.program import ModuleProgram

KIND = "buffer"
"""Kind of stored tensor."""


def persistent(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module's state, by name, but for empty ones."""
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept and buffer.numel()}


def stored_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Stored name -> shape of every buffer."""
    return {_key(name): tuple(stored(name, buffer).shape) for name, buffer in persistent(module).items()}


def _key(name: str) -> str:
    return f"{KIND}/{unwrapped(name)}"


def stored(name: str, buffer: Tensor) -> Tensor:
    """A buffer as a checkpoint has it: a vector or matrix of floating-point numbers. Raises `UserError` for integers
    that these cannot hold."""
    real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    wide = real if str(real.dtype).removeprefix("torch.") in CODES else real.double()
    if not torch.equal(wide.to(real.dtype), real):
        raise UserError(f"the buffer {name} has integers of more than 53 bits, which checkpoints do not store")
    return wide.flatten(0, -2) if wide.dim() > 2 else wide.reshape(-1) if wide.dim() == 0 else wide


def written(program: ModuleProgram) -> dict[str, Tensor]:
    """Stored name -> values of the buffers that this rank writes."""
    comms, stages = program.comms, program.stages
    if comms.index(STAGE):
        return {}

    def here(name: str) -> bool:
        home = stages.chain.home(name) if stages is not None else ""
        return home in program.plan.parts if home else comms.index(PP) == 0

    buffers = persistent(program.module).items()
    return {_key(name): stored(name, buffer) for name, buffer in buffers if here(name)}


def restore_buffers(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Set all buffers that a checkpoint has."""
    for name, buffer in persistent(module).items():
        if (key := _key(name)) not in checkpoint.tensors:
            continue
        dtype = "float32" if checkpoint.tensors[key].dtype == "bfloat16" else checkpoint.tensors[key].dtype
        values = torch.from_numpy(np.ascontiguousarray(checkpoint.read(key, dtype=dtype)))
        target = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        target.copy_(values.view(target.shape))
