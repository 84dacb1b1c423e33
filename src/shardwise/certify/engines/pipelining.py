"""torch's pipeline schedules over the tiny decoder's parts. Tied weights and norms over stages are left to trainers
there, so the norm is this file's, and no variant is tied."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as kinds

from shardwise.certify.adapter import EngineRun, gradients

name = "torch pipelining"
axes, data = ("pp",), ()
schedules = ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
space = {"pp": (1, 2, 4), "schedule": schedules, "micro": (4, 6)}
variants = ("plain", "uneven", "frozen", "padded")


def parallelize(model: Any, layout: dict[str, Any]) -> Any:
    """(schedule, this rank's stages): two where the schedule needs them, in a loop or as a V."""
    ranks, rank, kind = layout["pp"], dist.get_rank(), layout.get("schedule", "1F1B")
    places = [rank, 2 * ranks - 1 - rank if "V" in kind else rank + ranks]
    places, count = (places[:1], ranks) if layout.get("schedule", "1F1B") in ("1F1B", "GPipe") else (places, 2 * ranks)
    model.table.register_forward_hook(lambda table, ids, x: x + model.positions)
    parts = [model.table, *model.blocks, nn.Sequential(model.norm, model.head)]
    if count > len(parts):
        raise ValueError(f"{count} stages of a model with {len(parts)} parts")
    cut = [place * len(parts) // count for place in range(count + 1)]
    stages = [PipelineStage(nn.Sequential(*parts[cut[i] : cut[i + 1]]), i, count, torch.device("cpu")) for i in places]
    schedule = kinds.get_schedule_class(kind)(
        *([stages] if len(stages) > 1 else stages), layout.get("micro", 4), scale_grads=False,
        loss_fn=lambda logits, labels, tokens: F.cross_entropy(logits.mT, labels, reduction="sum") / tokens,
    )  # fmt: skip
    mine = {module for stage in stages for module in stage.submod.modules()}
    for path, module in [*model.named_modules()]:  # without other ranks' parameters
        if not [*module.children()] and module not in mine:
            model.set_submodule(path, nn.Identity())
    return schedule, stages


def backward(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float | None:
    """One step of the schedule. Returns the loss on the last stage."""
    schedule, stages = run.engine
    losses: list[Tensor] = []
    inputs = [ids] if any(stage.is_first for stage in stages) else []
    schedule.step(*inputs, target=labels, losses=losses, loss_kwargs={"tokens": tokens})
    return float(sum(losses)) if losses else None


def clip(run: EngineRun, most: float) -> float:
    """The norm over all stages."""
    square = torch.zeros((), dtype=torch.float64)
    for gradient in gradients(run).values():
        square += gradient.square().sum()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(run.model.parameters(), most, square.sqrt(), foreach=False)
    return float(square.sqrt())
