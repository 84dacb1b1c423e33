"""Collectives by `torch.distributed`: gloo between processes, NCCL between CUDA devices."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import UserError
from shardwise.layout.algorithms import Carried
from shardwise.runtime.torch_versions import all_gather_single, reduce_scatter_single
from shardwise.runtime.transport.buffers import Buffer, ByteCounter, Target, Workspace, add_up, wide_room
from shardwise.runtime.transport.protocol import Realization, Transport, Work
from shardwise.runtime.transport.sends import SendTransport
from shardwise.schedule.traffic import Moved
from shardwise.schedule.verify import verify


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, by rank. All ranks must call it."""
    # The group itself is not kept: gloo's threads must be gone when the process ends.
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


class ProcessGroupTransport(Transport):
    """`Transport` over a process group.

    On gloo a reduce-scatter is an all-to-all and a local sum in rank order: gloo's own is slower than its all-reduce,
    and sums bf16 in bf16. NCCL's is its own, and sums bf16 in bf16.

    ranks: the group's, in the order of their places. down: the group of messages to lower ranks, where another than
    `group`: what NCCL sends to a rank waits for what came before.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: tuple[int, ...], backend: str, down: dist.ProcessGroup | None = None
    ) -> None:
        self.group, self.ranks, self.backend = group, ranks, backend
        self._place = ranks.index(dist.get_rank())
        self._down = down or group
        self._scratch: Buffer | None = None
        self._sends: SendTransport | None = None

    def how(self, op: str, full: Tensor) -> Realization:
        summed = op == "reduce_scatter" and self.backend == "gloo"
        return Realization("all-to-all, sum in rank order" if summed else self.backend, False)

    # -- memory

    def reserve(self, elements: int, dtype: torch.dtype, device: torch.device, tally: ByteCounter) -> list[Tensor]:
        if self.backend != "gloo":
            return []
        self._scratch = Buffer("comm", elements, dtype, device, tally)
        return [self._scratch.tensor]

    def abort(self) -> None:
        """On gloo a message that does not come in time closes the group's connections; NCCL has its own watchdog."""
        if self.backend != "gloo":
            return
        peer = self.ranks[self._place - 1]
        for group in {self.group, self._down}:
            with suppress(RuntimeError):
                work: Any = dist.irecv(torch.empty(1), peer, group)
                work.wait(timedelta(milliseconds=1))

    # -- collectives

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False, at_once: bool = False) -> Work:
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        work: Work = dist.all_reduce(tensor, op, self.group, async_op=True)
        return work

    def all_gather(self, out: Tensor, piece: Tensor, *, at_once: bool = False) -> Work:
        if piece.dtype != out.dtype:
            n = piece.numel()
            piece = out.view(-1)[self._place * n : (self._place + 1) * n].copy_(piece.reshape(-1))
        work: Work = all_gather_single(out.view(-1), piece.reshape(-1), self.group, async_op=True)
        return work

    def reduce_scatter(self, full: Tensor, into: Callable[[], Target]) -> Work:
        pieces = full.view(len(self.ranks), -1)
        if self.backend != "gloo":
            own = pieces[self._place]
            work = reduce_scatter_single(own, full, self.group, async_op=True)
            return _Sum(work, self._unsummed(own), into, None)
        scratch = self._scratch
        if scratch is not None and (full.dtype != scratch.tensor.dtype or full.numel() > scratch.tensor.numel()):
            scratch = None  # not what it was reserved for
        received = torch.empty_like(full) if scratch is None else scratch.take(full.numel())
        work = dist.all_to_all_single(received, full, group=self.group, async_op=True)
        return _Sum(work, list(received.view_as(pieces)), into, scratch)

    def _unsummed(self, own: Tensor) -> list[Tensor]:
        return [own]

    def all_to_all(
        self, out: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], *, at_once: bool = False
    ) -> Work:
        work: Work = dist.all_to_all_single(out, tensor, list(received), list(sent), self.group, async_op=True)
        return work

    def send(self, tensor: Tensor, peer: int) -> Work:
        group = self.group if peer > self._place else self._down
        work: Any = dist.isend(tensor, self.ranks[peer], group)
        return work

    def receive(self, out: Tensor, peer: int) -> Work:
        group = self.group if peer < self._place else self._down
        work: Any = dist.irecv(out, self.ranks[peer], group)
        return work

    def run_schedule(
        self, carried: Carried, flat: Tensor, start: int, width: int, workspace: Workspace, maximum: bool
    ) -> Moved:
        assert (start, width * carried.pieces) == (0, flat.numel()), "sends run a schedule once, on the whole tensor"
        if self._sends is None:
            self._sends = SendTransport(self.group)
        room = workspace.take("room", carried.room, flat.dtype, flat.device)
        return self._sends.run(carried.schedule, flat, room, maximum=maximum)


class _Sum:
    """A reduce-scatter whose pieces are received, and added up by `wait`."""

    def __init__(self, work: Any, pieces: list[Tensor], into: Callable[[], Target], scratch: Buffer | None) -> None:
        self._work, self._pieces, self._into, self._scratch = work, pieces, into, scratch

    def wait(self) -> None:
        self._work.wait()
        target = self._into()
        add_up(self._pieces, target, wide_room(target, len(self._pieces)))
        if self._scratch is not None:
            self._scratch.free()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        """The received pieces, for who records when they are there."""
        return self._work.get_future()


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


_findings = cache(verify)
