"""Second oracles: torch's own FSDP2 and DTensor tensor parallelism, applied to the plain decoder on real ranks.

Each job trains as the one-device reference does and returns an `Outcome` with whole tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness.reference import STEPS, Case, Outcome, dtype_of, global_batch, make_batch, values
from shardwise.decoder import Decoder
from shardwise.decoder.modules import Linear, Lookup
from shardwise.model.parameters import parameters
from shardwise.runtime.optimizer import learning_rate


def _decoder(case: Case) -> Decoder:
    decoder = Decoder(case.model)
    table = {p.name: p for p in parameters(case.model)}
    for name, tensor in decoder.named_parameters():
        spec = table[name]
        tensor.data = values(spec, torch.arange(spec.numel)).view(spec.shape).to(dtype_of(case.precision))
    for block in decoder.blocks:
        block.attention.core.kind = case.attention
    return decoder


def fsdp(rank: int, case: Case) -> Outcome:
    """FSDP2, one unit a block, over all ranks; each takes its share of the sequences."""
    world = dist.get_world_size()
    decoder = _decoder(case)
    mesh = init_device_mesh("cpu", (world,))
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    share = case.workload.batch // world
    # FSDP2 averages gradients over ranks; the loss here is a sum divided by all ranks' tokens.
    return _train(case, decoder, slice(rank * share, (rank + 1) * share), scale=world)


def tensor_parallel(rank: int, case: Case) -> Outcome:
    """DTensor's Megatron-style plan over all ranks; every rank sees every sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    decoder = _decoder(case)
    _use_torch_modules(decoder)
    plan: dict[str, Any] = {
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "embedding.tokens": RowwiseParallel(input_layouts=Replicate()),
        "head.out": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in (
        "attention.qkv.q",
        "attention.qkv.k",
        "attention.qkv.v",
        "mlp.gate_up.gate",
        "mlp.gate_up.up",
        "mlp.up.up",
    ):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    names = dict(decoder.named_modules())
    plan = {k: v for k, v in plan.items() if k.replace("*", "0") in names}
    return _train(case, parallelize_module(decoder, mesh, plan), slice(None), scale=1)


def _use_torch_modules(decoder: nn.Module) -> None:
    """DTensor's styles know nn.Linear and nn.Embedding alone: the same weights in those."""
    for module in list(decoder.modules()):
        for name, child in list(module.named_children()):
            new: nn.Module | None = None
            if isinstance(child, Linear):
                new = nn.Linear(child.weight.shape[1], child.weight.shape[0], bias=child.bias is not None)
                new.weight, new.bias = child.weight, child.bias
            elif isinstance(child, Lookup):
                new = nn.Embedding(*child.weight.shape)
                new.weight = child.weight
            if new is not None:
                setattr(module, name, new)


def _train(case: Case, decoder: nn.Module, rows: slice, scale: int) -> Outcome:
    config = case.optimizer
    named = dict(decoder.named_parameters())
    decays = {p.name: p.decay for p in parameters(case.model)}
    groups = [
        {"params": [p for n, p in named.items() if decays[n] is decay], "weight_decay": config.weight_decay * decay}
        for decay in (True, False)
    ]
    adam = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False)
    outcome = Outcome([], [], {}, {})
    for step in range(STEPS):
        every = global_batch(case, step)
        mine = {name: tensor[rows] for name, tensor in every.items()}
        valid = (every["targets"] != -100).sum()
        logits = decoder(make_batch(case, mine, step))
        loss = F.cross_entropy(logits.flatten(0, 1), mine["targets"].flatten(), reduction="sum") / valid
        adam.zero_grad()
        (loss * scale).backward()
        gradients = {n: _whole(p.grad) for n, p in named.items()}
        if step == 0:
            outcome.first_grads = gradients
        norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
        for parameter in named.values():
            parameter.grad.mul_(min(1.0, config.clip / (norm + 1e-6)))
        for group in adam.param_groups:
            group["lr"] = learning_rate(config, step, STEPS)
        adam.step()
        loss = loss.detach().clone()
        if scale > 1:
            dist.all_reduce(loss)
        outcome.losses.append(loss.item())
        outcome.norms.append(norm)
    outcome.final = {n: _whole(p.detach()) for n, p in named.items()}
    return outcome


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).double().clone()
