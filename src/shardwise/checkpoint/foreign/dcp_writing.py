"""A `torch.distributed.checkpoint` folder, by torch's own writer: FSDP2 and torchtitan load it on any number of ranks.

Keys are `model.<name>`, `optim.state.<name>.exp_avg`, `.exp_avg_sq` and `.step`, and `optim.param_groups`, as
`dcp.save({"model": ..., "optim": ...})` of `get_state_dict` has them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from shardwise.checkpoint.foreign.written import WrittenState, WrittenTensor, torch_for_writing
from shardwise.data.extras import require

_FIELDS = {"first": "exp_avg", "second": "exp_avg_sq"}


def write_dcp(state: WrittenState, folder: Path) -> None:
    """Write a state to an empty folder, one tensor in memory at a time."""
    torch = torch_for_writing()
    dcp = require("torch.distributed.checkpoint", "train", "writing other trainers' checkpoints")
    sources = _sources(state)
    tree: dict[str, Any] = {key: _shape_only(tensor) for key, tensor in sources.items()}
    if state.kinds[1:]:
        # Keys as a nested state dict has them once it is flat.
        for name in state.decays:
            tree[f"optim.state.{name}.step"] = torch.tensor(float(state.updates))
        tree["optim.param_groups"] = state.groups()
    planner = _lazy_planner(dcp, sources)(flatten_state_dict=False)
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    try:
        with warnings.catch_warnings():
            # One process writes all of it, of which torch warns.
            warnings.simplefilter("ignore")
            dcp.save(tree, storage_writer=writer, planner=planner, no_dist=True)
    except dcp.CheckpointException as error:
        # torch collects each rank's exception; there is one rank.
        ((reason, _),) = error.failures.values()
        raise reason from None


def _sources(state: WrittenState) -> dict[str, WrittenTensor]:
    """Key -> its tensor."""
    found = {f"model.{tensor.name}": tensor for tensor in state.tensors["model"]}
    found |= {f"model.{name}": found[f"model.{first}"] for name, first in state.aliases.items()}
    for kind in state.kinds[1:]:
        found |= {f"optim.state.{tensor.name}.{_FIELDS[kind]}": tensor for tensor in state.tensors[kind]}
    return found


def _shape_only(tensor: WrittenTensor) -> Any:
    torch = torch_for_writing()
    return torch.empty(tensor.spec.shape, dtype=getattr(torch, tensor.spec.dtype), device="meta")


def _lazy_planner(dcp: Any, sources: dict[str, WrittenTensor]) -> Any:
    """A class of torch's planner that reads a tensor when it is written."""

    class LazyPlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
        def lookup_object(self, index: Any) -> Any:
            tensor = sources.get(index.fqn)
            return super().lookup_object(index) if tensor is None else tensor.load()

    return LazyPlanner
