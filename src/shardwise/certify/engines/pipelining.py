"""torch's pipeline schedules over the tiny decoder's parts. Tied weights and norms over stages are left to trainers
there, so the norm is this file's, and no variant is tied."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from shardwise.certify.adapter import EngineRun

name = "torch pipelining"
axes, data = ("pp",), ()
SINGLE = ("1F1B", "GPipe")
schedules = (*SINGLE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
space = {"pp": (1, 2, 4), "schedule": schedules, "micro": (4, 6)}
variants = ("plain", "uneven", "frozen", "padded")


class Embed(nn.Module):
    """The first part: token ids to hidden states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.table, self.positions = model.table, model.positions

    def forward(self, ids: Tensor) -> Tensor:
        table: Any = self.table
        return table(ids) + self.positions


def mean_loss(logits: Tensor, labels: Tensor, tokens: int) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens


def parallelize(model: Any, layout: dict[str, Any]) -> Any:
    """(schedule, this rank's stages): two per rank where the schedule needs them, in a loop or as a V."""
    kind, ranks, rank = layout.get("schedule", "1F1B"), layout["pp"], dist.get_rank()
    count = ranks if kind in SINGLE else 2 * ranks
    parts = [Embed(model), *model.blocks, nn.Sequential(model.norm, model.head)]
    if count > len(parts):
        raise ValueError(f"{count} stages of a model with {len(parts)} parts")
    places = [rank] if count == ranks else [rank, count - 1 - rank if "V" in kind else rank + ranks]
    stages = []
    for place in places:
        start, end = place * len(parts) // count, (place + 1) * len(parts) // count
        stages.append(PipelineStage(nn.Sequential(*parts[start:end]), place, count, torch.device("cpu")))
    schedule = get_schedule_class(kind)(
        stages[0] if count == ranks else stages, layout.get("micro", 4), loss_fn=mean_loss, scale_grads=False
    )
    return schedule, stages


def backward(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float | None:
    """One step of the schedule. Returns the loss on the last stage."""
    schedule, stages = run.engine
    losses: list[Tensor] = []
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    schedule.step(
        *([ids] if first else []), target=labels if last else None, losses=losses, loss_kwargs={"tokens": tokens}
    )
    return float(sum(item.item() for item in losses)) if last else None


def stage_parameters(run: EngineRun) -> dict[str, nn.Parameter]:
    """This rank's parameters by their names in the plain model."""
    mine = {id(p) for stage in run.engine[1] for p in stage.submod.parameters()}
    return {name: p for name, p in run.model.named_parameters() if id(p) in mine}


def gradients(run: EngineRun) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in stage_parameters(run).items() if p.grad is not None}


def parameters(run: EngineRun) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in stage_parameters(run).items()}


def clip(run: EngineRun, most: float) -> float:
    """The norm over all stages."""
    square = torch.zeros((), dtype=torch.float64)
    for gradient in gradients(run).values():
        square += gradient.square().sum()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(stage_parameters(run).values(), most, square.sqrt(), foreach=False)
    return float(square.sqrt())


def optimizer(run: EngineRun, **settings: Any) -> Any:
    return torch.optim.AdamW(stage_parameters(run).values(), foreach=False, **settings)


def state(run: EngineRun) -> dict[str, Any]:
    """Name -> parameters and moments, which are made where there are none."""
    tensors: dict[str, Any] = {}
    for name, p in stage_parameters(run).items():
        if p.requires_grad:
            kept = run.optimizer.state[p]
            kept.setdefault("step", torch.tensor(0.0))
            for moment in ("exp_avg", "exp_avg_sq"):
                kept.setdefault(moment, torch.zeros_like(p))
            tensors |= {f"{name}/{key}": value for key, value in kept.items()}
        tensors[name] = p.data
    return tensors


def save(run: EngineRun, folder: str) -> None:
    checkpoint.save(state(run), checkpoint_id=folder)


def load(run: EngineRun, folder: str) -> None:
    checkpoint.load(state(run), checkpoint_id=folder)
