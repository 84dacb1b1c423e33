"""Megatron-LM issue 6660: Megatron-FSDP's gradients where a data-parallel group has one rank.

Ranks of `copies` have the same rows and a group of their own each, as experts have where `ep` is all data ranks. CUDA's
streams and events have stand-ins that do nothing.
"""

from contextlib import nullcontext
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard import fully_shard_model, fully_shard_optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.certify.tiny import TinyBlock

name, needs = "Megatron-FSDP", ("megatron-core", "torch")
axes, data = ("copies", "dp"), ("dp",)
space = {"copies": (1, 2), "dp": (1, 2, 4), "accumulate": (1, 2, 4)}
variants, skips, rebuilds, exact = ("plain", "uneven"), ("resume",), True, False
torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = MagicMock()
torch.cuda.stream, torch.cuda.current_device = lambda stream: nullcontext(), lambda: 0
torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None
torch.Tensor.cuda = lambda tensor: tensor


def parallelize(model, layout):
    sizes = layout.get("copies", 1), layout.get("dp", 1), 1
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "dp", "tp"))
    return fully_shard_model(
        model.float(), mesh["dp", "tp"], dp_shard_dim="dp", tp_dim="tp", device=torch.device("cpu"),
        fsdp_unit_modules=[TinyBlock], calculate_per_token_loss=True, preproc_state_dict_for_dcp_ckpt=False,
    )  # fmt: skip


def optimizer(run, **settings):
    adam = torch.optim.AdamW(run.engine.parameters(), foreach=False, **settings)
    return fully_shard_optimizer(adam, preproc_state_dict_for_dcp_ckpt=False)


def backward(run, ids, labels, tokens):
    """Micro-batches, whose gradients Megatron-FSDP adds."""
    total, parts = 0.0, run.layout.get("accumulate", 1)
    for some, right in zip(ids.chunk(parts), labels.chunk(parts), strict=True):
        loss = F.cross_entropy(run.engine(some).flatten(0, 1), right.flatten(), reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    return total


def whole(run, part):
    """Of parts with other numbers of rows, which gloo does not gather; a rank without rows has no gradient."""
    result = {}
    for name, p in run.engine.module.named_parameters():
        group, tensor = p.device_mesh["dp"].get_group(), part(p)
        parts = [None] * group.size()
        dist.all_gather_object(parts, torch.empty(0) if tensor is None else tensor.to_local().flatten(), group=group)
        result[name] = torch.cat(parts).view(p.shape)
    return result


def gradients(run):
    return whole(run, lambda p: p.grad)


def parameters(run):
    return whole(run, lambda p: p.detach())


def clip(run, most):
    norm = torch.stack([gradient.norm() for gradient in gradients(run).values()]).norm()
    nn.utils.clip_grads_with_norm_(run.engine.parameters(), most, norm, foreach=False)
    return float(norm)
