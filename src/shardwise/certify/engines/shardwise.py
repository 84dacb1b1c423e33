"""shardwise itself: the tiny decoder, split by `shardwise.split`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.certify.adapter import EngineRun
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.module.split import split
from shardwise.runtime.zero.flat_unit import FlatUnit, local_values

name = "shardwise"
needs = ("shardwise", "torch")
axes, data = ("pp", "dp", "tp"), ("dp",)
space = {
    "pp": (1, 2), "dp": (1, 2, 3, 4), "tp": (1, 2, 4), "zero": (0, 1, 2, 3), "sp": (0, 1),
    "schedule": ("1f1b", "gpipe"), "shard": (0, 2),
}  # fmt: skip
within = {"zero": "dp", "sp": "tp", "schedule": "pp", "shard": "zero"}
saves_frozen = False
skips = ("clipped",)
global_loss = True
MICRO = 2
PLAN = {"blocks.*.q": "column", "blocks.*.k": "column", "blocks.*.v": "column", "blocks.*.o": "row",
        "blocks.*.up": "column", "blocks.*.down": "row"}  # fmt: skip
NORMS = {"blocks.*.norm1": "sequence_parallel", "blocks.*.norm2": "sequence_parallel"}


def decays(name: str, parameter: Tensor) -> bool:
    return parameter.dim() > 1


class SplitEngine:
    """A split module; what a step has seen."""

    def __init__(self, model: nn.Module, layout: dict[str, Any]) -> None:
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        flags = {"sp"} & {key for key, value in layout.items() if value == 1}
        text = ",".join([*(f"{k}={v}" for k, v in layout.items() if k != "sp"), *flags, "precision=fp64"])
        parts = ["table", "blocks.*", "norm", "head"] if layout.get("pp", 1) > 1 else None
        self.split = split(
            model, text, PLAN | (NORMS if flags else {}), blocks=["TinyBlock"], parts=parts, accumulate=MICRO
        )
        self.norm, self.seen = 0.0, dict[str, Tensor]()

    def whole(self, held: Iterable[tuple[FlatUnit, Tensor]]) -> dict[str, Tensor]:
        """Whole tensors of intervals, which ranks exchange."""
        pieces = []
        for flat, tensor in held:
            for start, placed in zip(flat.unit.offsets, flat.unit.placed, strict=True):
                a, b = max(start, flat.start), min(start + placed.numel, flat.stop)
                if a < b:
                    # Places from 1 on: padding has 0.
                    index = local_values(placed, a - start, b - start, lambda p, index: index + 1, tensor.device)
                    pieces.append((placed.name, index.long(), tensor[a - flat.start : b - flat.start].double()))
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, pieces)
        tensors = {name: torch.zeros(shape.numel() + 1, dtype=torch.float64) for name, shape in self.shapes.items()}
        for name, index, values in (piece for one in every for piece in one):
            tensors[name][index] = values
        return {name: tensor[1:].view(self.shapes[name]) for name, tensor in tensors.items()}


parallelize = SplitEngine


def optimizer(run: EngineRun, **settings: Any) -> None:
    run.engine.split.program.optimizer.config = OptimizerConfig(**settings, clip=run.most)


def backward(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float:
    """The whole step, whose gradients are kept before they are clipped."""
    engine, program = run.engine, run.engine.split.program
    update = program.optimizer.step

    def keep(lr: float) -> Any:
        engine.seen = engine.whole((flat, flat.grads_interval) for flat in program.engine.trained)
        return update(lr)

    def loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        summed = F.cross_entropy(model(rows[0]).flatten(0, 1), rows[1].flatten(), reduction="sum")
        return summed, int((rows[1] != -100).sum())

    program.optimizer.step = keep
    outcome = engine.split.train_step(loss, list(zip(ids.chunk(MICRO), labels.chunk(MICRO), strict=True)))
    del program.optimizer.step
    engine.norm = outcome.grad_norm
    return float(outcome.loss)


def gradients(run: EngineRun) -> dict[str, Tensor]:
    return run.engine.seen


def clip(run: EngineRun, most: float) -> float:
    return float(run.engine.norm)


def step(run: EngineRun) -> None:
    """`backward` has made it."""


def parameters(run: EngineRun) -> dict[str, Tensor]:
    """Masters of what trains, weights of what is frozen."""
    program = run.engine.split.program
    held = [(state.flat, state.master) for state in program.optimizer.states]
    held += [(flat, flat.interval) for flat in program.engine.units.values() if flat.unit.frozen]
    return run.engine.whole(held)


def save(run: EngineRun, folder: str) -> None:
    run.engine.split.save(folder)


def load(run: EngineRun, folder: str) -> None:
    run.engine.split.load(folder)
