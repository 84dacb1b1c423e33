"""Training's collectives by the schedules that a layout names (`algorithm=`), over sends or shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from shardwise.errors import UserError
from shardwise.layout.algorithms import Carried
from shardwise.runtime.transport.adding import Target, add_up
from shardwise.runtime.transport.buffers import Workspace
from shardwise.runtime.transport.protocol import Transport
from shardwise.schedule import CommSchedule
from shardwise.schedule.provenance import CollectiveDefect
from shardwise.schedule.traffic import Moved
from shardwise.schedule.verify import verify


class ScheduledCollective:
    """One collective on a flat full tensor, which `wait` runs: every rank must wait for them in the same order.

    place: this rank's in its group. moved: receives what was sent. piece: what this rank gives to an all-gather. into:
    where its piece of a reduce-scatter goes, called when the sum is made. Raises `UserError` for a schedule that
    verification finds wrong.
    """

    def __init__(
        self,
        transport: Transport,
        carried: Carried,
        flat: Tensor,
        place: int,
        workspace: Workspace,
        moved: Callable[[Moved], object],
        maximum: bool,
        piece: Tensor | None,
        into: Callable[[], Target] | None,
    ) -> None:
        self._transport, self._carried, self._flat, self._place = transport, carried, flat, place
        self._workspace, self._moved, self._maximum = workspace, moved, maximum
        self._piece, self._into = piece, into
        if findings := _findings(carried.schedule):
            schedule = carried.schedule
            raise UserError(f"{schedule.name} for {schedule.ranks} ranks is wrong: {findings[0].text}")

    def wait(self) -> None:
        if (piece := self._piece) is not None:
            own = self._flat[self._place * piece.numel() :][: piece.numel()]
            if own.data_ptr() != piece.data_ptr():
                own.copy_(piece.reshape(-1))
        target = None if self._into is None else self._into()
        # A step's measurement gets the workspace's bytes from its counter.
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            self._run(target)

    def is_completed(self) -> bool:
        return False

    def _run(self, target: Target | None) -> None:
        carried, flat = self._carried, self._flat
        wide = carried.dtype != str(flat.dtype).removeprefix("torch.")
        for start, width in carried.runs:
            if wide:
                rows = self._widened(start, width)
                self._run_once(rows.view(-1), 0, width)
                part = rows[self._place]
            else:
                self._run_once(flat, start, width)
                own = self._place * (flat.numel() // carried.pieces) + start
                part = flat[own : own + width]
            if target is not None:
                add_up([part], target._replace(tensor=target.tensor[start : start + width]), None)

    def _widened(self, start: int, width: int) -> Tensor:
        """Elements [start, start + width) of each rank's piece, in the dtype of the sum: [ranks, width]."""
        carried, dtype = self._carried, getattr(torch, self._carried.dtype)
        nbytes = carried.pieces * width * dtype.itemsize
        rows = self._workspace.take("wide", nbytes, dtype, self._flat.device).view(carried.pieces, width)
        rows.copy_(self._flat.view(carried.pieces, -1)[:, start : start + width])
        return rows

    def _run_once(self, flat: Tensor, start: int, width: int) -> None:
        """The schedule on elements [start, start + width) of each piece of a contiguous tensor, in place."""
        run = self._transport.run_schedule
        self._moved(run(self._carried, flat, start, width, self._workspace, self._maximum))


@cache
def _findings(schedule: CommSchedule) -> list[CollectiveDefect]:
    return verify(schedule)
