"""Training's collectives by the schedules that a layout names (`algorithm=`), over sends or shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import UserError
from shardwise.layout.algorithms import Carried
from shardwise.runtime.transport.adding import Target, add_up
from shardwise.runtime.transport.sends import SendTransport
from shardwise.schedule import CommSchedule
from shardwise.schedule.provenance import CollectiveDefect
from shardwise.schedule.traffic import Moved
from shardwise.schedule.verify import verify

if TYPE_CHECKING:
    from shardwise.runtime.transport.shared import SharedTransport


class Workspace:
    """Buffers of one rank for all schedules, which run one at a time: room for staged and packed messages, and an fp32
    copy of what is summed there. Each is as large as its largest use so far. changed: receives every difference in
    bytes."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self.changed: Callable[[int], object] = lambda difference: None

    def take(self, name: str, nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`nbytes` bytes of undefined content, as `dtype`."""
        held = self._buffers.get(name)
        if held is None or held.numel() < nbytes:
            before = 0 if held is None else held.numel()
            held = None
            self._buffers.pop(name, None)
            self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.changed(nbytes - before)
        return self._buffers[name][:nbytes].view(dtype)


class ScheduledCollective:
    """One collective on a flat full tensor, which `wait` runs: every rank must wait for them in the same order.

    into: where this rank's piece of a reduce-scatter goes, asked when the sum is made. moved: receives what was sent.
    """

    def __init__(
        self,
        runner: ScheduleRunner,
        carried: Carried,
        flat: Tensor,
        moved: Callable[[Moved], object],
        maximum: bool = False,
        into: Callable[[], Target] | None = None,
    ) -> None:
        self._runner, self._carried, self._flat, self._moved = runner, carried, flat, moved
        self._maximum, self._into = maximum, into

    def wait(self) -> None:
        target = None if self._into is None else self._into()
        # A step's measurement gets the workspace's bytes from the engine.
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            self._run(target)

    def _run(self, target: Target | None) -> None:
        carried, flat, runner = self._carried, self._flat, self._runner
        piece = flat.numel() // carried.pieces
        for start, width in carried.runs:
            own = runner.rank * piece + start
            if runner.wide(carried, flat):
                rows = runner.widened(carried, flat, start, width)
                self._moved(runner.run(carried, rows.view(-1), 0, width, self._maximum))
                part = rows[runner.rank]
            else:
                self._moved(runner.run(carried, flat, start, width, self._maximum))
                part = flat[own : own + width]
            if target is not None:
                add_up([part], target._replace(tensor=target.tensor[start : start + width]), None)


class ScheduleRunner:
    """Runs schedules on one group of ranks: through shared memory where they have it, else by sends."""

    def __init__(self, group: dist.ProcessGroup, shared: SharedTransport | None, workspace: Workspace) -> None:
        self.rank = dist.get_rank(group)
        self._shared, self._workspace = shared, workspace
        self._sends = None if shared is not None else SendTransport(group)

    def wide(self, carried: Carried, flat: Tensor) -> bool:
        """Whether the sum is made in another dtype than the tensor's."""
        return carried.dtype != str(flat.dtype).removeprefix("torch.")

    def widened(self, carried: Carried, flat: Tensor, start: int, width: int) -> Tensor:
        """Elements [start, start + width) of each rank's piece, in the dtype of the sum: [ranks, width]."""
        dtype = getattr(torch, carried.dtype)
        nbytes = carried.pieces * width * dtype.itemsize
        rows = self._workspace.take("wide", nbytes, dtype, flat.device).view(carried.pieces, width)
        rows.copy_(flat.view(carried.pieces, -1)[:, start : start + width])
        return rows

    def check(self, schedule: CommSchedule) -> None:
        """Raise `UserError` for a schedule that verification finds wrong; it runs once for each."""
        if findings := _findings(schedule):
            raise UserError(f"{schedule.name} for {schedule.ranks} ranks is wrong: {findings[0].text}")

    def run(self, carried: Carried, flat: Tensor, start: int, width: int, maximum: bool) -> Moved:
        """The schedule once, on elements [start, start + width) of each piece of a contiguous tensor, in place."""
        if self._shared is not None:
            return self._shared.run_window(carried.schedule, flat, start, width, carried.pieces, maximum)
        assert self._sends is not None
        room = self._workspace.take("room", carried.room, flat.dtype, flat.device)
        return self._sends.run(carried.schedule, flat, room, maximum=maximum)


@cache
def _findings(schedule: CommSchedule) -> list[CollectiveDefect]:
    return verify(schedule)
