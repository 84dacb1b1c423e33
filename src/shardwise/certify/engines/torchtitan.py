"""torchtitan's Llama 3 debug model, parallelized by torchtitan with spmd_types, whose checks of types are on.

A forward pass with a wrong type raises an error ("failed"), so that each proven cell has two witnesses: types and
numbers.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

torch._utils._get_available_device_type = lambda: "cpu"
import spmd_types
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, utils
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.parallelize import parallelize_llama

from shardwise.certify.adapter import EngineRun

name, needs = "torchtitan", ("torchtitan", "spmd_types", "torch")
axes, data = ("dp_replicate", "dp_shard", "tp"), ("dp_replicate", "dp_shard")
space = {"dp_replicate": (1, 2), "dp_shard": (1, 2, 4), "tp": (1, 2, 4), "sp": (1, 0)}
within = {"sp": "tp"}
variants = ("plain", "uneven", "tied", "frozen")
exact = False  # it gathers parameters, and computes rotations and the loss in float32
rebuilds = True


def config_of(variant: str) -> Any:
    config = copy.deepcopy(model_registry("debugmodel").model)
    config.enable_weight_tying = variant == "tied"
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def build(variant: str) -> nn.Module:
    utils.set_spmd_backend("partial_dtensor")  # there are no meshes
    model: Any = config_of(variant).build()
    model.init_states(buffer_device=torch.device("cpu"))
    model.variant = variant
    for part in (model.tok_embeddings, model.layers["0"]) if variant == "frozen" else ():
        part.requires_grad_(False)
    return model


models = {"llama3 debugmodel": build}


def parallelize(model: Any, layout: dict[str, Any]) -> nn.Module:
    """Built again with the layout's sharding, as torchtitan's trainer does."""
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=layout.get("dp_replicate", 1), tensor_parallel_degree=layout.get("tp", 1),
        data_parallel_shard_degree=layout.get("dp_shard", 1), enable_sequence_parallel=bool(layout.get("sp", 1)),
    )  # fmt: skip
    utils.set_spmd_backend(parallelism.spmd_backend)
    dims, config = ParallelDims.from_config(parallelism, torch.distributed.get_world_size()), config_of(model.variant)
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    split: Any = config.build()
    split.load_state_dict(model.state_dict())
    split = parallelize_llama(
        split, parallel_dims=dims, parallelism=parallelism, compile_config=CompileConfig(), ac_config=None,
        training=TrainingConfig(mixed_precision_param="float32"), dump_folder="",
    )  # fmt: skip
    for name, p in model.named_parameters():
        split.get_parameter(name).requires_grad_(p.requires_grad)
    split.dims, split.context = dims, utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=True)
    split.loss = CrossEntropyLoss.Config().build(compile_config=CompileConfig())
    return split


def backward(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float:
    ids, labels, words = annotate_input_spmd_types(run.engine.dims, ids, labels, {})
    with run.engine.context():
        loss, _ = run.engine.loss(run.engine(ids, **words), labels, torch.tensor(float(tokens)))
        with spmd_types.no_typecheck():
            loss.backward()
    return float(loss)


def clip(run: EngineRun, most: float) -> float:
    return float(utils.clip_grad_norm_(list(run.model.parameters()), most, foreach=False))
