"""Losses that call a module twice, or leave blocks out, on ranks and in plain PyTorch."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.module_jobs import LR, SETTINGS, adamw, distances, end
from shardwise.errors import UserError
from shardwise.layout.axes import DATA
from shardwise.runtime.module.split import SplitModule, split

STEPS, ROWS, WIDTH = 3, 4, 4


class Leaving(nn.Module):
    """A map, blocks of which a pass may leave out some, a map. What blocks return may be changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(4)
        )
        self.leave = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor, without: tuple[int, ...] = (), in_place: bool = False) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            if number in without:
                continue
            y = block(x)
            if in_place:
                y += x
            x = y if in_place else x + y
        return self.leave(x)


Loss = Callable[[nn.Module, Tensor, int, int], Tensor]
"""(module, rows, step, rank) -> the mean loss of a rank's rows."""


def contrastive(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    scores = model(x) @ model(x.flip(0) * 0.5).t()
    return F.cross_entropy(scores, torch.arange(len(x)))


def preference(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    """Chosen and rejected rows by passes of their own, each with its reference afterwards."""
    chosen = model(x)
    with torch.no_grad():
        one = model(x + 1)
    rejected = model(-x)
    with torch.no_grad():
        other = model(1 - x)
    return F.softplus((0.5 * rejected - other).sum(1) - (chosen - one).sum(1)).mean()


def chained(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    return model(torch.tanh(model(x))).square().mean()


def left_out(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    """The first, a middle, and the last block, each in a step."""
    return model(x, without=[(0,), (1, 2), (3,)][step]).square().mean()


def left_out_by_rank(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    return model(x, without=[(0, rank + 1), (3,) * rank, (2 - rank,)][step]).square().mean()


def both(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    """Two passes, each without blocks of its own; a third that the loss does not use."""
    y, z = model(x, without=(3,)), model(x + 1, without=(0, 2))
    model(x)
    return (y - z).square().mean()


def early_exit(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    """The loss does not depend on the later blocks, which run all the same."""
    seen: list[Tensor] = []
    inner = getattr(model, "module", model)
    handle = inner.blocks[1].register_forward_hook(lambda block, given, out: seen.append(out))
    y = model(x)
    handle.remove()
    return seen[0].square().mean() if step else y.square().mean()


def in_place(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    y = model(x, in_place=True)
    y += 1
    return y.square().mean()


LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (contrastive, preference, chained, left_out, left_out_by_rank, both, early_exit, in_place)
}


def rows_of(step: int) -> Tensor:
    return torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def reference(name: str, accumulate: int = 1) -> dict[str, Tensor]:
    """Final parameters in plain PyTorch: two ranks' rows, one after the other."""
    torch.manual_seed(0)
    module = Leaving().double()
    optimizer = adamw(module.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, rows in enumerate(rows_of(step).chunk(2)):
            for part in rows.chunk(accumulate):
                (LOSSES[name](module, part, step, rank) / (2 * accumulate)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), SETTINGS.clip)
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def _made(name: str, layout: str, accumulate: int) -> tuple[SplitModule, Callable[[Any, Any], Tensor]]:
    """(a split module, a loss of (step, rows) by this rank)."""
    torch.manual_seed(0)
    parts = ["enter", "blocks.*", "leave"] if "pp" in layout else None
    plan = {"blocks.*.0": "column", "blocks.*.2": "row"} if "tp" in layout else None
    folder = tempfile.mkdtemp() if "nvme" in layout else None
    module = split(
        Leaving(), f"{layout},precision=fp64", plan, parts=parts, accumulate=accumulate, optimizer=SETTINGS,
        offload_dir=folder,
    )  # fmt: skip
    place = module.program.comms.index(DATA)
    return module, lambda model, batch: LOSSES[name](model, batch[1], batch[0], place)


def train_passes(rank: int, payload: tuple[str, str, int, dict[str, Tensor]]) -> dict[str, float]:
    """Parameter -> squared distance to plain PyTorch over this rank's interval. payload: (loss, layout, micro-batches
    per step, final parameters in plain PyTorch)."""
    name, layout, accumulate, expected = payload
    module, loss = _made(name, layout, accumulate)
    comms = module.program.comms
    for step in range(STEPS):
        rows = rows_of(step).chunk(2)[comms.index(DATA)]
        module.train_step(loss, [(step, part) for part in rows.chunk(accumulate)], lr=LR)
    errors = distances(module, expected)
    end(module)
    return errors


def rejected(rank: int, payload: tuple[str, str]) -> str:
    """The message of a step that does not run. payload: (loss, layout)."""
    name, layout = payload
    module, loss = _made(name, layout, 2)
    try:
        module.train_step(loss, [(0, part.unsqueeze(0) if "sp" in layout else part) for part in rows_of(0).chunk(2)])
    except UserError as error:
        return str(error)
    finally:
        module.program.comms.close()
    return "it ran"
