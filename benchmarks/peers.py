"""The same training step as a user of other libraries would write it: what shardwise is measured against.

Each builder returns a `Contender`: a function that trains one global batch, and what it is called.
All train `shardwise.decoder.Decoder` from the same seed with fused AdamW, one process a rank, gloo.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.decoder import Batch, Decoder
from shardwise.decoder.modules import Linear, Lookup, RMSNorm
from shardwise.decoder.random import initial_values
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout import pipeline as pipelines
from shardwise.model import ModelConfig
from shardwise.model.parameters import blueprint, parameters
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.setup import local_view, make_comms
from shardwise.runtime.pipeline.step import TrainProgram

SEED = 0
LR = 1e-3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BUCKET = 5_000_000
"""Elements of DeepSpeed's buckets. Its default, 500 million, is allocated whatever the model's size."""


class Unavailable(Exception):
    """A peer that cannot run here. The message is one line: why, and what to do."""


@dataclass
class Contender:
    """step(index) trains one global batch and returns its mean loss over this rank's share (or the whole batch), NaN on
    a rank that does not know it.

    keeps_memory: whether the process keeps what it frees while this one trains.
    """

    step: Callable[[int], float]
    describe: str
    close: Callable[[], object] = lambda: None
    keeps_memory: bool = False


@dataclass(frozen=True)
class Setting:
    """What is trained: `batch` sequences of `seq` tokens over `ranks` data-parallel (or tensor-parallel) ranks, or
    through as many ranks of a pipeline in `micro_batches` parts."""

    model: ModelConfig
    seq: int
    batch: int
    precision: str
    ranks: int
    micro_batches: int = 1


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


def _loop(setting: Setting, module: nn.Module, share: slice, autocast: bool, parallel_loss: bool = False) -> Any:
    """The training step that every tutorial shows."""
    optimizer = adamw(module)

    def step(index: int) -> float:
        ids, targets = tokens(setting, index, share)
        with _loss_parallel() if parallel_loss else nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(module(plain_batch(ids)), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def shardwise(setting: Setting, layout: str, transport: str = "gloo") -> Contender:
    """This project's runtime under a layout text."""
    parsed = Layout.parse(f"{layout},precision={setting.precision}")
    workload = Workload(seq=setting.seq, batch=setting.batch)
    comms = make_comms(parsed, setting.model, dist.get_rank(), timeout=300, transport=transport)
    plan = unit_plan(setting.model, parsed, workload, rank=dist.get_rank(), backend=comms.backend)
    config = OptimizerConfig(lr=LR, clip=0.0)
    program = TrainProgram(plan, comms, config, lambda p, i: initial_values(p, i, SEED), torch.device("cpu"))
    program.optimizer.looks_at_norm = False  # the peers' loops do not compute it either
    share = data_share(setting) if parsed.dp > 1 else slice(None)

    def step(index: int) -> float:
        ids, targets = tokens(setting, index, share)
        pairs = [
            local_view(plain_batch(i.contiguous()), t.contiguous(), plan)
            for i, t in zip(ids.split(parsed.micro), targets.split(parsed.micro), strict=True)
        ]
        return program.step(pairs, LR)[0]

    return Contender(step, f"shardwise {layout}{', shared memory' if transport == 'shared' else ''}", keeps_memory=True)


def plain(setting: Setting) -> Contender:
    """One device, no wrapper; bf16 by autocast."""
    return Contender(_loop(setting, plain_decoder(setting), slice(None), setting.precision == "bf16"), "plain loop")


def ddp(setting: Setting) -> Contender:
    """torch.nn.parallel.DistributedDataParallel; bf16 by autocast, gradients as bucket views."""
    decoder = nn.parallel.DistributedDataParallel(plain_decoder(setting), gradient_as_bucket_view=True)
    return Contender(_loop(setting, decoder, data_share(setting), setting.precision == "bf16"), "DDP")


def fsdp2(setting: Setting) -> Contender:
    """torch.distributed.fsdp.fully_shard on every block and the whole; bf16 by its own policy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    decoder = plain_decoder(setting)
    low = torch.bfloat16 if setting.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
    for block in decoder.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(decoder, mp_policy=policy)
    return Contender(_loop(setting, decoder, data_share(setting), False), "FSDP2")


def fsdp1(setting: Setting) -> Contender:
    """torch.distributed.fsdp.FullyShardedDataParallel, one unit a block; bf16 by its own policy."""
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
    return Contender(_loop(setting, wrapped, data_share(setting), False), "FSDP1")


def deepspeed(setting: Setting, stage: int, offload: bool = False) -> Contender:
    """DeepSpeed ZeRO on its CPU accelerator, with torch's fused AdamW and no clipping; bf16 by its own config.

    offload: ZeRO-Offload, whose optimizer is DeepSpeed's CPU Adam, which is compiled on its first use.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise Unavailable("deepspeed is not installed; `pip install deepspeed` adds its rows")
    initialize = _deepspeed_initialize(setting.ranks)
    decoder = plain_decoder(setting)
    zero = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = BUCKET
    optimizer = adamw(decoder)
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        zero["offload_optimizer"] = {"device": "cpu"}
        known = optimizer.param_groups[0]
        kept = {name: known[name] for name in ("lr", "betas", "eps")}
        optimizer = DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=True, **kept)
    config = {
        "train_micro_batch_size_per_gpu": setting.batch // setting.ranks,
        "gradient_clipping": 0,
        "bf16": {"enabled": setting.precision == "bf16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    linear = _OwnLinear()
    with linear.theirs():
        engine = initialize(model=decoder, optimizer=optimizer, config=config, dist_init_required=False)[0]
    share = data_share(setting)

    def step(index: int) -> float:
        ids, targets = tokens(setting, index, share)
        with linear.theirs():
            loss = loss_of(engine(plain_batch(ids)), targets)
            engine.backward(loss)
            engine.step()
        return float(loss.detach())

    return Contender(step, "DeepSpeed ZeRO-Offload" if offload else f"DeepSpeed ZeRO-{stage}", engine.destroy)


def _deepspeed_initialize(ranks: int) -> Callable[..., Any]:
    """`deepspeed.initialize`, silent, on the process group at hand."""
    rank = str(dist.get_rank())
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": rank, "LOCAL_RANK": rank, "LOCAL_SIZE": str(ranks)}
    os.environ |= {"WORLD_SIZE": str(ranks)}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # A shared-memory all-reduce for inference, which training never calls, would be compiled on the spot.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    initialize: Callable[..., Any] = deepspeed.initialize
    return initialize


class _OwnLinear:
    """DeepSpeed's ZeRO-3 replaces `torch.nn.functional.linear` for good: it keeps that, and nobody else gets it."""

    def __init__(self) -> None:
        self._linear = F.linear

    @contextmanager
    def theirs(self) -> Iterator[None]:
        everyone = F.linear
        F.linear = self._linear
        try:
            yield
        finally:
            self._linear, F.linear = F.linear, everyone


def _use_torch_modules(decoder: nn.Module, norms: bool) -> None:
    """DTensor's styles know torch's own modules alone: the same weights in those."""
    for module in list(decoder.modules()):
        for name, child in list(module.named_children()):
            new: Any
            if isinstance(child, Linear):
                new = nn.Linear(child.weight.shape[1], child.weight.shape[0], bias=child.bias is not None)
                new.bias = child.bias
            elif isinstance(child, Lookup):
                new = nn.Embedding(*child.weight.shape)
            elif isinstance(child, RMSNorm) and norms:
                new = nn.RMSNorm(child.weight.shape[0], eps=child.eps)
            else:
                continue
            new.weight = child.weight
            setattr(module, name, new)


def _loss_parallel() -> Any:
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def tensor_parallel(setting: Setting, sequence: bool) -> Contender:
    """DTensor tensor parallel by torch's own styles, with its vocabulary-parallel loss.

    sequence: the residual stream is sharded along the sequence, norms are `SequenceParallel`; else sums are
    all-reduces.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    decoder = plain_decoder(setting)
    _use_torch_modules(decoder, norms=sequence)
    mesh = init_device_mesh("cpu", (setting.ranks,))
    stream = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {"embedding.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)}
    for i in range(setting.model.layers):
        block = f"blocks.{i}"
        plan |= {f"{block}.attention.qkv.{n}": ColwiseParallel() for n in "qkv"}
        plan |= {f"{block}.mlp.gate_up.{n}": ColwiseParallel() for n in ("gate", "up")}
        plan |= {f"{block}.{n}": RowwiseParallel(output_layouts=stream) for n in ("attention.out", "mlp.down")}
        if sequence:
            plan |= {f"{block}.{n}_norm": SequenceParallel() for n in ("attention", "mlp")}
            for part, more in (("attention", (None,)), ("mlp", ())):  # attention also takes the batch
                plan[f"{block}.{part}"] = PrepareModuleInput(
                    input_layouts=(stream, *more), desired_input_layouts=(Replicate(), *more)
                )
    if sequence:
        plan["head.norm"] = SequenceParallel()
    plan["head.out"] = ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(decoder, mesh, plan)
    step = _loop(setting, decoder, slice(None), setting.precision == "bf16", parallel_loss=True)
    return Contender(step, "DTensor TP + SP" if sequence else "DTensor TP")


PIPELINES = {
    "pipeline_1f1b": ("1f1b", 1, "Schedule1F1B"),
    "pipeline_gpipe": ("gpipe", 1, "ScheduleGPipe"),
    "pipeline_interleaved": ("interleaved", 2, "ScheduleInterleaved1F1B"),
    "pipeline_zb_v": ("zb-v", 2, "ScheduleZBVZeroBubble"),
}
"""Name -> (our schedule, chunks a rank, torch's class)."""


class _Stage(nn.Module):
    """Consecutive parts of a decoder, from ids or the stage before's output. bf16 by autocast, messages included.

    batch: the positions of a micro-batch. The rotary tables that it comes to have serve all micro-batches.
    """

    def __init__(self, parts: nn.ModuleList, batch: Batch, low: bool) -> None:
        super().__init__()
        self.parts, self.batch, self.low = parts, batch, low

    def forward(self, x: Tensor) -> Tensor:
        batch = self.batch if x.is_floating_point() else replace(self.batch, ids=x)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
            for part in self.parts:
                x = part(x, batch)
        return x.to(torch.bfloat16) if self.low else x


def _stages(setting: Setting, layout: Layout) -> list[Any]:
    """torch's stages of this rank, cut and placed as `layout` has them. Shapes are given, so that none are negotiated
    in the first step."""
    from torch.distributed.pipelining import PipelineStage

    parts = dict(plain_decoder(setting).parts())
    cut = blueprint(setting.model).stages(pipelines.stages(setting.model, layout).layers)
    placement = pipelines.placement(layout)
    micro, low = setting.batch // setting.micro_batches, setting.precision == "bf16"
    ids = torch.zeros(micro, setting.seq, dtype=torch.int64)

    def like(width: int) -> Tensor:
        dtype = DTYPES[setting.precision]
        return torch.empty(micro, setting.seq, width, dtype=dtype, device="meta", requires_grad=True)

    found = []
    for index in (i for i, rank in enumerate(placement) if rank == dist.get_rank()):
        module = _Stage(nn.ModuleList(parts[name] for name in cut[index]), plain_batch(ids), low)
        takes = ids if index == 0 else like(setting.model.hidden)
        gives = like(setting.model.vocab if index == len(placement) - 1 else setting.model.hidden)
        found.append(PipelineStage(module, index, len(placement), torch.device("cpu"), takes, gives))
    return found


def pipeline(setting: Setting, name: str) -> Contender:
    """A schedule of torch.distributed.pipelining. bf16 by autocast, which casts each weight once a step."""
    from torch.distributed import pipelining

    schedule, virtual, kind = PIPELINES[name]
    m = setting.micro_batches
    stages = _stages(setting, Layout.parse(f"pp={setting.ranks},schedule={schedule},virtual={virtual}"))
    run = getattr(pipelining, kind)(
        stages if virtual > 1 else stages[0],
        m,
        # Micro-batches are equal: means over them, divided here, make the mean over the global batch.
        loss_fn=lambda logits, targets: loss_of(logits, targets) / m,
        scale_grads=False,
    )
    optimizer = adamw(nn.ModuleList(stage.submod for stage in stages))
    first, last = stages[0].is_first, stages[-1].is_last

    def step(index: int) -> float:
        ids, targets = tokens(setting, index, slice(None))
        losses: list[Tensor] = []
        # Weights cast in a stage's autocast are kept until the outermost one ends, which casts nothing itself.
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            run.step(*[ids] * first, target=targets if last else None, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(sum(loss.detach() for loss in losses)) if last else float("nan")

    return Contender(step, f"torch {kind.removeprefix('Schedule')}")


PEERS: dict[str, Callable[[Setting], Contender]] = {
    "plain": plain,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp1": fsdp1,
    **{f"deepspeed{stage}": functools.partial(deepspeed, stage=stage) for stage in (1, 2, 3)},
    "deepspeed_offload": functools.partial(deepspeed, stage=2, offload=True),
    "tensor_parallel": functools.partial(tensor_parallel, sequence=False),
    "sequence_parallel": functools.partial(tensor_parallel, sequence=True),
    **{name: functools.partial(pipeline, name=name) for name in PIPELINES},
}
"""Name -> what builds it. Raises `Unavailable` where it cannot run."""
