"""Training of modules some of whose parameters have a gradient now and then, on ranks and in plain PyTorch."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.module_jobs import LR, SETTINGS, adamw, distances, end
from shardwise.layout.axes import DATA
from shardwise.runtime.module.split import SplitModule, split

STEPS = 4
PARTS = ["enter", "blocks.*", "often", "never", "freed"]


class NowAndThen(nn.Module):
    """Maps that some rows use: `often` those of every second step, of one rank alone; `never` none."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.often, self.never, self.freed = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, often: bool) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.freed(self.often(x) if often else x)


def rows_of(step: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def freeze(module: nn.Module, step: int) -> None:
    """A block and a map are frozen after the second step, and train again in the last one."""
    for part in (module.get_submodule("enter"), module.get_submodule("blocks.0"), module.get_submodule("freed")):
        part.requires_grad_(step != 2)


def reference() -> dict[str, Tensor]:
    """Final parameters in plain PyTorch. The second rank's rows use `often` in odd steps."""
    torch.manual_seed(0)
    module = NowAndThen().double()
    optimizer = adamw(module.parameters())
    for step in range(STEPS):
        freeze(module, step)
        optimizer.zero_grad()
        for rank, rows in enumerate(rows_of(step).chunk(2)):
            (module(rows, bool(rank and step % 2)).square().sum() / 2.5).backward()
        nn.utils.clip_grad_norm_(module.parameters(), SETTINGS.clip)
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


@dataclass(frozen=True)
class IdleTraining:
    """Training of `NowAndThen`, with a save after the third step into `folder`, and the last step after a load."""

    layout: str
    folder: str


def _made(layout: str) -> SplitModule:
    torch.manual_seed(0)
    parts = PARTS if "pp" in layout else None
    plan = {"often": "colwise_gather_output"} if "tp" in layout else None
    return split(NowAndThen(), f"{layout},precision=fp64", plan, parts=parts, optimizer=SETTINGS)


def train_idle(rank: int, payload: tuple[IdleTraining, dict[str, Tensor]]) -> tuple[dict[str, float], int]:
    """(parameter -> squared distance to plain PyTorch over this rank's interval, missed updates of `never`)."""
    job, expected = payload
    module = _made(job.layout)
    comms = module.program.comms
    place, count = comms.index(DATA), comms.size(DATA)

    def loss(model: SplitModule, batch: tuple[int, Tensor]) -> tuple[Tensor, float]:
        step, rows = batch
        halves = [rows] if count == 2 else rows.chunk(2)
        total = [model(half, bool(half is halves[-1] and (place or count == 1) and step % 2)) for half in halves]
        return sum(part.square().sum() for part in total), 2.5 / count  # type: ignore[return-value]

    for step in range(STEPS):
        if step == STEPS - 1:
            module.save(Path(job.folder))
            comms.close()
            module = _made(job.layout)
            comms = module.program.comms
            module.load(Path(job.folder))
        freeze(module.module, step)
        module.train_step(loss, (step, rows_of(step).chunk(count)[place]), lr=LR)
    errors = distances(module, expected)
    end(module)
    return errors, module.program.optimizer.missed["never.weight"]
