"""Which trainer wrote a folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from shardwise.checkpoint.foreign import dcp, deepspeed
from shardwise.checkpoint.foreign.state import ForeignState
from shardwise.checkpoint.names import unwrapped_names
from shardwise.errors import UserError

_READERS = {"dcp": dcp.read, "deepspeed": deepspeed.read}
FORMATS = tuple(_READERS)
"""torch.distributed.checkpoint (FSDP2), and DeepSpeed's ZeRO-1/2/3 and universal checkpoints."""


def open_foreign(folder: Path | str, format: str = "auto", *, weights_only: bool = False) -> ForeignState:
    """The state in a folder. format: one of `FORMATS`, or "auto" to look what it is. weights_only: leave the
    optimizer out.

    Only names and shapes are read. Raises `UserError` when it is of no format that is read here, or damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}")
    if format not in (*FORMATS, "auto"):
        raise UserError(f"unknown format {format!r}; choose auto or one of {', '.join(FORMATS)}")
    _refuse_megatron(folder)
    read = _READERS[_detect(folder) if format == "auto" else format]
    state = read(folder, weights_only)
    return replace(state, tensors={kind: unwrapped_names(tensors) for kind, tensors in state.tensors.items()})


def _detect(folder: Path) -> str:
    if (folder / ".metadata").exists():
        return "dcp"
    if deepspeed.is_one(folder):
        return "deepspeed"
    raise UserError(
        f"{folder} holds neither .metadata (torch.distributed.checkpoint) nor DeepSpeed's *_optim_states.pt or zero/ "
        "(ZeRO, universal); Hugging Face folders are read by train --weights"
    )


def _refuse_megatron(folder: Path) -> None:
    """megatron-core 0.16 neither trains nor saves without CUDA: none can be made where shardwise is tested."""
    try:
        content = json.loads((folder / "metadata.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        content = None
    torch_dist = isinstance(content, dict) and "sharded_backend" in content
    if torch_dist or (folder / "latest_checkpointed_iteration.txt").exists():
        raise UserError(
            f"{folder} is a Megatron-LM checkpoint, which shardwise does not read: export it as a Hugging Face folder, "
            "for train --weights"
        )
