"""Hugging Face accelerate's `ParallelismConfig`: DDP, FSDP2, replicas of its shards, and models that DTensor has split.

accelerate raises an error for CPU ranks (`ParallelismConfig._validate_accelerator`), so it takes them for GPUs here.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from torch import Tensor

from shardwise.certify.adapter import EngineRun, full
from shardwise.certify.engines.tensor_parallel import parallelize as split_tensors

name, needs = "accelerate ParallelismConfig", ("accelerate", "torch")
axes, data = ("dp_replicate", "dp_shard", "tp"), ("dp_replicate", "dp_shard")
space = {"dp_replicate": (1, 2), "dp_shard": (1, 2, 3, 4), "tp": (1, 2), "reshard": (1, 0)}
within = {"reshard": "dp_shard"}
variants = ("plain", "uneven", "tied", "frozen", "padded", "dropout")


class Prepared:
    """A model, prepared when its optimizer is known."""

    def __init__(self, model: Any, layout: dict[str, Any]) -> None:
        PartialState._prepare_backend = lambda self, *words: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
        os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # else DDP gets a GPU's number
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # the last case's
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        plugin = None
        if layout.get("dp_shard", 1) > 1:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, reshard_after_forward=bool(layout.get("reshard", 1)), cpu_ram_efficient_loading=False,
                auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["TinyBlock"],
            )  # fmt: skip
        sizes = {f"{axis}_size": layout.get(axis, 1) for axis in axes}
        self.accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes), fsdp_plugin=plugin)
        if layout.get("tp", 1) > 1:
            tied = model.head.weight is model.table.weight
            split_tensors(model, {"tp": layout["tp"]}).tp_size = layout["tp"]
            if tied:  # torch has made two of it
                model.head.weight = model.table.weight
        self.engine: Any = None


parallelize = Prepared


def optimizer(run: EngineRun, **settings: Any) -> Any:
    """AdamW, prepared with the model."""
    adam = torch.optim.AdamW(run.model.parameters(), foreach=False, **settings)
    run.engine.engine, prepared = run.engine.accelerator.prepare(run.model, adam)
    return prepared


def logits(engine: Any, ids: Tensor) -> Tensor:
    logits: Tensor = (engine.engine if isinstance(engine, Prepared) else engine)(ids)
    return logits


def clip(run: EngineRun, most: float) -> float:
    return float(full(run.engine.accelerator.clip_grad_norm_(run.engine.engine.parameters(), most)))
