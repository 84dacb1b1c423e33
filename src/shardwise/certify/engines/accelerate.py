"""Hugging Face accelerate's `ParallelismConfig`: FSDP2 and HSDP of the tiny decoder. Its tensor parallelism takes
transformers' models alone."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

from shardwise.certify.adapter import Run, full

name = "accelerate ParallelismConfig"
needs = ("accelerate", "torch")
axes = data = ("dp_replicate", "dp_shard")
space = {"dp_replicate": (1, 2), "dp_shard": (1, 2, 4), "reshard": (1, 0)}
within = {"reshard": "dp_shard"}
rebuilds = True
variants = ("plain", "uneven", "tied", "frozen", "padded")


class Engine:
    """An accelerator and what it has prepared."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer


def parallelize(model: nn.Module, layout: dict[str, Any]) -> nn.Module:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=bool(layout.get("reshard", 1)), auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"], cpu_ram_efficient_loading=False,
    )  # fmt: skip
    config = ParallelismConfig(
        dp_replicate_size=layout.get("dp_replicate", 1), dp_shard_size=layout.get("dp_shard", 1)
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    prepared.certified = Engine(accelerator, prepared, prepared_optimizer)
    return prepared


def optimizer(run: Run, **settings: Any) -> Any:
    prepared = run.engine.certified.optimizer
    for group in prepared.param_groups:
        group.update(settings)
    return prepared
