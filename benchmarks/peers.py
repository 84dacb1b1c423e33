"""The same training step as a user of other libraries would write it: what shardwise is measured against.

Each builder returns a `Contender`: a function that trains one global batch, and what it is called.
All train `shardwise.decoder.Decoder` from the same seed with fused AdamW, one process a rank, gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder import Batch, Decoder
from shardwise.decoder.initial import initial_values
from shardwise.decoder.modules import Linear, Lookup
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.model.parameters import parameters
from shardwise.runtime.config import OptimizerConfig
from shardwise.runtime.setup import make_comms, stream_view
from shardwise.runtime.step import Program

SEED = 0
LR = 1e-3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Contender:
    """step(index) trains one global batch; `describe` says what it is."""

    step: Callable[[int], None]
    describe: str


@dataclass(frozen=True)
class Setting:
    """What is trained: `batch` sequences of `seq` tokens over `ranks` data-parallel (or tensor-parallel) ranks."""

    model: ModelConfig
    seq: int
    batch: int
    precision: str
    ranks: int


def tokens(setting: Setting, index: int, share: slice) -> tuple[Tensor, Tensor]:
    """(ids, targets) of this rank's share of global batch `index`."""
    generator = torch.Generator().manual_seed(index)
    rows = torch.randint(setting.model.vocab, (setting.batch, setting.seq + 1), generator=generator)[share]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def plain_batch(ids: Tensor) -> Batch:
    positions = torch.arange(ids.shape[1]).expand(ids.shape).contiguous()
    return Batch(ids, positions, positions, None, positions, positions)


def plain_decoder(setting: Setting) -> Decoder:
    """The decoder with shardwise's initial weights, in the precision's parameter dtype."""
    decoder = Decoder(setting.model)
    table = {p.name: p for p in parameters(setting.model)}
    for name, tensor in decoder.named_parameters():
        spec = table[name]
        tensor.data = initial_values(spec, torch.arange(spec.numel), SEED).view(spec.shape).float()
    return decoder


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    # One fused call cannot mix DTensors with plain tensors: a group for each kind.
    kinds: dict[type, list[Tensor]] = {}
    for parameter in module.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    groups = [{"params": params} for params in kinds.values()]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def data_share(setting: Setting) -> slice:
    each = setting.batch // setting.ranks
    return slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)


def _loop(setting: Setting, module: nn.Module, optimizer: Any, share: slice, autocast: bool) -> Callable[[int], None]:
    def step(index: int) -> None:
        ids, targets = tokens(setting, index, share)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = module(plain_batch(ids))
            loss = loss_of(logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def shardwise(setting: Setting, layout: str) -> Contender:
    """This project's runtime under a layout text."""
    parsed = Layout.parse(f"{layout},precision={setting.precision}")
    workload = Workload(seq=setting.seq, batch=setting.batch)
    comms = make_comms(parsed, setting.model, dist.get_rank(), timeout=300)
    plan = unit_plan(setting.model, parsed, workload, rank=dist.get_rank())
    config = OptimizerConfig(lr=LR, clip=0.0)
    program = Program(plan, comms, config, lambda p, i: initial_values(p, i, SEED), torch.device("cpu"))
    share = data_share(setting) if parsed.dp > 1 else slice(None)

    def step(index: int) -> None:
        ids, targets = tokens(setting, index, share)
        pairs = [
            (stream_view(plain_batch(i.contiguous()), parsed, plan.tp_rank), t.contiguous())
            for i, t in zip(ids.split(parsed.micro), targets.split(parsed.micro), strict=True)
        ]
        program.step(pairs, LR)

    return Contender(step, f"shardwise {layout}")


def plain(setting: Setting) -> Contender:
    """One device, no wrapper."""
    decoder = plain_decoder(setting)
    step = _loop(setting, decoder, adamw(decoder), slice(None), setting.precision == "bf16")
    return Contender(step, "plain loop")


def ddp(setting: Setting) -> Contender:
    """torch.nn.parallel.DistributedDataParallel; bf16 by autocast, gradients as bucket views."""
    decoder = nn.parallel.DistributedDataParallel(plain_decoder(setting), gradient_as_bucket_view=True)
    step = _loop(setting, decoder, adamw(decoder), data_share(setting), setting.precision == "bf16")
    return Contender(step, "DDP")


def fsdp2(setting: Setting) -> Contender:
    """torch.distributed.fsdp.fully_shard on every block and the whole; bf16 by its own policy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    decoder = plain_decoder(setting)
    low = torch.bfloat16 if setting.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
    for block in decoder.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(decoder, mp_policy=policy)
    return Contender(_loop(setting, decoder, adamw(decoder), data_share(setting), False), "FSDP2")


def fsdp1(setting: Setting) -> Contender:
    """torch.distributed.fsdp.FullyShardedDataParallel, one unit a block."""
    import functools

    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    decoder = plain_decoder(setting)
    blocks = {type(block) for block in decoder.blocks}
    low = MixedPrecision(torch.bfloat16, torch.bfloat16) if setting.precision == "bf16" else None
    wrapped = FullyShardedDataParallel(
        decoder,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks),
        mixed_precision=low,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return Contender(_loop(setting, wrapped, adamw(wrapped), data_share(setting), False), "FSDP1")


def _use_torch_modules(decoder: nn.Module) -> None:
    """DTensor's styles know nn.Linear and nn.Embedding alone: the same weights in those."""
    for module in list(decoder.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                linear = nn.Linear(child.weight.shape[1], child.weight.shape[0], bias=child.bias is not None)
                linear.weight, linear.bias = child.weight, child.bias
                setattr(module, name, linear)
            elif isinstance(child, Lookup):
                embedding = nn.Embedding(*child.weight.shape)
                embedding.weight = child.weight
                setattr(module, name, embedding)


def tensor_parallel(setting: Setting) -> Contender:
    """DTensor tensor parallel by torch's own styles, sums as all-reduces."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    decoder = plain_decoder(setting)
    _use_torch_modules(decoder)
    mesh = init_device_mesh("cpu", (setting.ranks,))
    plan: dict[str, Any] = {"embedding.tokens": RowwiseParallel(input_layouts=Replicate())}
    for i in range(setting.model.layers):
        block = f"blocks.{i}"
        plan |= {f"{block}.attention.qkv.{n}": ColwiseParallel() for n in "qkv"}
        plan |= {f"{block}.mlp.gate_up.{n}": ColwiseParallel() for n in ("gate", "up")}
        plan |= {f"{block}.attention.out": RowwiseParallel(), f"{block}.mlp.down": RowwiseParallel()}
    plan["head.out"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(decoder, mesh, plan)
    step = _loop(setting, decoder, adamw(decoder), slice(None), setting.precision == "bf16")
    return Contender(step, "DTensor tensor parallel")
