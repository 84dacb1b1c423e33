"""torchtitan's Llama 3 debug model, parallelized by torchtitan's functions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import distribute_tensor

torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan asks when it is imported
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.parallelize import parallelize_llama

from shardwise.certify.adapter import EngineRun
from shardwise.certify.tiny import SEQ

name, needs = "torchtitan", ("torchtitan", "torch")
axes, data = ("dp_replicate", "dp_shard", "tp"), ("dp_replicate", "dp_shard")
space = {"dp_replicate": (1, 2), "dp_shard": (1, 2, 4), "tp": (1, 2, 4), "sp": (1, 0)}
within = {"sp": "tp"}
variants, rebuilds = ("plain", "uneven", "tied", "frozen"), True
exact = False  # it gathers parameters, and computes rotations and the loss in float32


def config_of(variant: str) -> Any:
    """torchtitan's debug model with torch's attention, for sequences of the tiny data."""
    config = model_registry("debugmodel").model
    config.enable_weight_tying = variant == "tied"
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope = replace(layer.attention.rope, max_seq_len=SEQ)
    return config


def set_rotations(model: Any, ids: Any) -> None:
    """Again: `Module.to(float64)` takes complex numbers for real ones."""
    for layer in model.layers.values():
        layer.attention.rope.cache = layer.attention.rope._precompute_cache()


def build(variant: str) -> nn.Module:
    """The debug model on one device, without meshes."""
    utils.set_spmd_backend("partial_dtensor")
    model: Any = config_of(variant).build()
    model.init_states(buffer_device=torch.device("cpu"))
    model.variant = variant
    model.register_forward_pre_hook(set_rotations)
    for part in (model.tok_embeddings, model.layers["0"]) if variant == "frozen" else ():
        part.requires_grad_(False)
    return model


models = {"llama3 debugmodel": build}


def parallelize(model: Any, layout: dict[str, Any]) -> nn.Module:
    """Built again with the layout's sharding, as torchtitan's trainer does."""
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=layout.get("dp_replicate", 1), tensor_parallel_degree=layout.get("tp", 1),
        data_parallel_shard_degree=layout.get("dp_shard", 1), enable_sequence_parallel=bool(layout.get("sp", 1)),
        spmd_backend="partial_dtensor",  # the default, "spmd_types", asks for another FSDP than torch 2.13's
    )  # fmt: skip
    dims, config = ParallelDims.from_config(parallelism, torch.distributed.get_world_size()), config_of(model.variant)
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        split: Any = config.build()
    split = parallelize_llama(
        split, parallel_dims=dims, parallelism=parallelism, compile_config=CompileConfig(), ac_config=None,
        training=TrainingConfig(mixed_precision_param="float32"), dump_folder="",
    )  # fmt: skip
    split.to_empty(device="cpu")
    with torch.no_grad():
        split.init_weights(buffer_device=None)
        for name, p in split.named_parameters():
            p.copy_(distribute_tensor(model.get_parameter(name).float(), p.device_mesh, p.placements))
    for module in (module for module in split.modules() if isinstance(module, FSDPModule)):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sums of scaled terms
    for name, p in split.named_parameters():
        p.requires_grad_(model.get_parameter(name).requires_grad)
    split.loss = CrossEntropyLoss.Config().build(compile_config=CompileConfig())
    return split


def backward(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float:
    """As torchtitan's trainer: it divides by all labels that count."""
    loss, _ = run.engine.loss(run.engine(ids), labels, torch.tensor(float(tokens)))
    loss.backward()
    return loss.item()


def clip(run: EngineRun, most: float) -> float:
    return float(utils.clip_grad_norm_(list(run.model.parameters()), most, foreach=False))


def optimizer(run: EngineRun, **settings: Any) -> Any:
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=settings)]
    return OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[run.model])


def save(run: EngineRun, folder: str) -> None:
    checkpoint.save({"model": ModelWrapper(run.model), "optimizer": run.optimizer}, checkpoint_id=folder)


def load(run: EngineRun, folder: str) -> None:
    checkpoint.load({"model": ModelWrapper(run.model), "optimizer": run.optimizer}, checkpoint_id=folder)
