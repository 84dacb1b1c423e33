"""Second oracles: torch's own FSDP2, DTensor tensor parallelism and pipelining, applied to the plain decoder on real
ranks.

Each job trains as the one-device reference does and returns an `Outcome` with whole tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness.reference import Case, Outcome, dtype_of, global_batch, make_batch, plain_decoder
from shardwise.decoder.modules import Linear, Lookup
from shardwise.layout import Layout
from shardwise.layout.pipeline import placement, stages
from shardwise.model.parameters import blueprint, parameters
from shardwise.runtime.zero.optimizer import learning_rate


def fsdp(rank: int, case: Case) -> Outcome:
    """FSDP2, one unit a block, over all ranks; each takes its share of the sequences."""
    world = dist.get_world_size()
    decoder = plain_decoder(case)
    mesh = init_device_mesh("cpu", (world,))
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    share = case.workload.batch // world
    # FSDP2 averages gradients over ranks; the loss here is a sum divided by all ranks' tokens.
    backward = _at_once(case, decoder, slice(rank * share, (rank + 1) * share), scale=world)
    return _train(case, decoder, backward)


def tensor_parallel(rank: int, case: Case) -> Outcome:
    """DTensor's Megatron-style plan over all ranks; every rank sees every sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    decoder = plain_decoder(case)
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
    decoder = parallelize_module(decoder, mesh, plan)
    return _train(case, decoder, _at_once(case, decoder, slice(None), scale=1))


SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb-v": pipelining.ScheduleZBVZeroBubble,
}


class _Stage(nn.Module):
    """Consecutive parts of a decoder. What a micro-batch consists of comes as keywords, cut by torch."""

    def __init__(self, parts: nn.ModuleList, case: Case) -> None:
        super().__init__()
        self.parts, self.case, self.step = parts, case, 0

    def forward(self, x: Tensor, **rows: Tensor) -> Tensor:
        batch = make_batch(self.case, rows, self.step)
        for part in self.parts:
            x = part(x, batch)
        return x


def pipeline(rank: int, payload: tuple[Case, Layout]) -> Outcome:
    """torch's schedule of the layout's name, whose stages are cut and placed as the layout says; it has no other axis.

    Every rank holds the whole decoder and computes with its own stages. Gradients are summed over ranks: of most, all
    but one have none, and those of a tied table torch leaves to its user.
    """
    case, layout = payload
    decoder = plain_decoder(case)
    parts, where = dict(decoder.parts()), placement(layout)
    cut = blueprint(case.model).stages(stages(case.model, layout).layers)
    shape = layout.micro, case.workload.seq

    def like(width: int) -> Tensor:
        return torch.empty(*shape, width, dtype=dtype_of(case.precision), requires_grad=True)

    mine = []
    for index in (i for i, holder in enumerate(where) if holder == rank):
        module = _Stage(nn.ModuleList(parts[name] for name in cut[index]), case)
        takes = like(case.model.hidden) if index else torch.zeros(shape, dtype=torch.int64)
        gives = like(case.model.hidden if index + 1 < len(where) else case.model.vocab)
        mine.append(pipelining.PipelineStage(module, index, len(where), torch.device("cpu"), takes, gives))
    schedule = SCHEDULES[layout.schedule](
        mine if layout.virtual > 1 else mine[0],
        case.workload.batch // layout.micro,
        loss_fn=lambda logits, targets, valid: _summed(logits, targets) / valid,
        scale_grads=False,
    )

    def backward(step: int) -> Tensor:
        rows = global_batch(case, step)
        targets, losses = rows.pop("targets"), []
        for stage in mine:
            stage.submod.step = step
        first = [rows["ids"]] if mine[0].is_first else []
        last = {"target": targets} if mine[-1].is_last else {}
        schedule.step(*first, **last, losses=losses, loss_kwargs={"valid": (targets != -100).sum()}, **rows)
        for parameter in decoder.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        loss = torch.zeros((), dtype=torch.float64) + sum(each.detach() for each in losses)
        dist.all_reduce(loss)
        return loss

    return _train(case, decoder, backward)


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


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _at_once(case: Case, decoder: nn.Module, rows: slice, scale: int) -> Callable[[int], Tensor]:
    """The backward pass of this rank's rows; gradients are divided by `scale` where ranks take different rows."""

    def backward(step: int) -> Tensor:
        every = global_batch(case, step)
        mine = {name: tensor[rows] for name, tensor in every.items()}
        loss = _summed(decoder(make_batch(case, mine, step)), mine["targets"]) / (every["targets"] != -100).sum()
        (loss * scale).backward()
        loss = loss.detach().clone()
        if scale > 1:
            dist.all_reduce(loss)
        return loss

    return backward


def adamw(case: Case, named: dict[str, Any], decays: dict[str, bool] | None = None) -> torch.optim.AdamW:
    """torch's AdamW as a case describes it. decays: parameter -> whether it decays, by default as ours do."""
    config = case.optimizer
    decays = decays or {p.name: p.decay for p in parameters(case.model)}
    groups = [
        {"params": [p for n, p in named.items() if decays[n] is decay], "weight_decay": config.weight_decay * decay}
        for decay in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=False)


def _train(case: Case, decoder: nn.Module, backward: Callable[[int], Tensor]) -> Outcome:
    """backward: makes the gradients of a step, and gives the loss of the global batch."""
    config = case.optimizer
    named = dict(decoder.named_parameters())
    adam = adamw(case, named)
    outcome = Outcome([], [], {}, {})
    for step in range(case.steps):
        adam.zero_grad()
        loss = backward(step)
        gradients = {n: _whole(p.grad) for n, p in named.items()}
        if step == 0:
            outcome.first_grads = gradients
        norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
        for parameter in named.values():
            parameter.grad.mul_(min(1.0, config.clip / (norm + 1e-6)))
        for group in adam.param_groups:
            group["lr"] = learning_rate(config, step, case.steps)
        adam.step()
        outcome.losses.append(loss.item())
        outcome.norms.append(norm)
    outcome.final = {n: _whole(p.detach()) for n, p in named.items()}
    return outcome


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).double().clone()
