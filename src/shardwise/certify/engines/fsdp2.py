"""torch's FSDP2: sharded parameters, gathered again in backward or kept, and replicas of shards (HSDP)."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

name = "torch FSDP2"
axes = data = ("dp_replicate", "dp_shard")
space = {"dp_replicate": (1, 2), "dp_shard": (1, 2, 3, 4), "reshard": (1, 0), "units": ("block", "model")}
variants = ("plain", "uneven", "tied", "frozen", "padded", "dropout")


def parallelize(model: Any, layout: dict[str, Any]) -> Any:
    """A unit per block, or one for the model."""
    replicas, shards = layout.get("dp_replicate", 1), layout.get("dp_shard", 1)
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))
    mesh = mesh if replicas > 1 else mesh["dp_shard"]
    again = bool(layout.get("reshard", 1))
    for block in model.blocks if layout.get("units", "block") == "block" else ():
        fully_shard(block, mesh=mesh, reshard_after_forward=again)
    return fully_shard(model, mesh=mesh, reshard_after_forward=again)
