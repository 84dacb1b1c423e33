"""What a rank runs for the tests of steps that are not finite: a split module."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import DivergedError, NotFiniteError
from shardwise.runtime.module.split import SplitModule, split


def split_steps(rank: int, layout: str) -> list[str]:
    """Steps of which one rank's loss is not finite, and a save of weights that are not; what came of each."""
    stops, skips = (_module(layout, mode) for mode in ("stop", "skip"))
    found = []
    for module, factor in ((stops, float("nan")), (skips, float("inf"))):
        module.train_step(_loss, torch.ones(4, 8))
        before = _weights(module)
        rows = torch.ones(4, 8) * (factor if rank == 1 else 1.0)
        try:
            found.append("skipped" if module.train_step(_loss, rows).skipped else "updated")
        except DivergedError:
            found.append("DivergedError")
        equal = torch.equal(before, _weights(module)) and module.program.optimizer.steps == 1
    found.append("equal" if equal else "changed")
    found.append("finite" if not stops.train_step(_loss, torch.ones(4, 8)).skipped else "poisoned")
    for state in stops.program.optimizer.states:
        state.put(0, 0, torch.full_like(state.master, float("nan")))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    try:
        stops.save(Path(folder[0]))
    except NotFiniteError:
        found.append("saved" if any(Path(folder[0]).iterdir()) else "not saved")
    dist.barrier()
    for module in (stops, skips):
        module.program.comms.close()
    return found


def _module(layout: str, on_nonfinite: str) -> SplitModule:
    torch.manual_seed(0)
    return split(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), layout, on_nonfinite=on_nonfinite)


def _loss(module: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    return module(rows).float().square().sum(), len(rows)


def _weights(module: SplitModule) -> Tensor:
    return torch.cat([state.master.clone() for state in module.program.optimizer.states])


def save_compiled(rank: int, folder: str) -> bool:
    """Save a compiled module, and load it into one that is not; whether their weights are equal."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    compiled = split(torch.compile(inner, backend="eager"), "dp=1")  # type: ignore[arg-type]
    compiled.train_step(_loss, torch.ones(4, 8))
    compiled.save(folder)
    plain = _module("dp=1", "stop")
    plain.load(folder)
    equal = torch.equal(_weights(plain), _weights(compiled))
    for module in (compiled, plain):
        module.program.comms.close()
    return equal
