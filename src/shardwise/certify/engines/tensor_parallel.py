"""torch's DTensor styles: tensor parallelism, sequence parallelism between blocks' maps, and FSDP2 around them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel

from shardwise.certify.adapter import clip_mixed

name = "torch DTensor TP"
axes, data = ("dp", "tp"), ("dp",)
space = {"dp": (1, 2), "tp": (1, 2, 4), "sp": (0, 1)}
within = {"sp": "tp"}
variants = ("plain", "uneven", "tied", "frozen", "padded", "dropout")
clip = clip_mixed


def sequence(layout: dict[str, Any]) -> str:
    return "tp" if layout.get("sp") else ""


def parallelize(model: Any, layout: dict[str, Any]) -> nn.Module:
    """Megatron-LM's cut: columns then rows, the vocabulary of table and head."""
    mesh = init_device_mesh("cpu", (layout.get("dp", 1), layout.get("tp", 1)), mesh_dim_names=("dp", "tp"))
    stream = Shard(1) if layout.get("sp") else Replicate()
    head = parallel.ColwiseParallel(input_layouts=stream, output_layouts=Replicate())
    plan: dict[str, Any] = {"table": parallel.RowwiseParallel(input_layouts=Replicate()), "head": head}
    for item in ("q", "k", "v", "up"):
        plan[f"blocks.*.{item}"] = parallel.ColwiseParallel(input_layouts=stream)
    for item in ("o", "down"):
        plan[f"blocks.*.{item}"] = parallel.RowwiseParallel(output_layouts=stream)
    if layout.get("sp"):
        plan |= dict.fromkeys(("blocks.*.norm1", "blocks.*.norm2", "norm"), parallel.SequenceParallel())
        plan["blocks"] = parallel.PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=stream, use_local_output=True
        )
    if layout.get("tp", 1) > 1:
        parallel.parallelize_module(model, mesh["tp"], plan)
    if layout.get("dp", 1) > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model
