"""Collectives by `torch.distributed`: gloo between processes, NCCL between CUDA devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout.algorithms import Carried
from shardwise.runtime.torch_versions import all_gather_single, reduce_scatter_single
from shardwise.runtime.transport.adding import Target, add_up, wide_room
from shardwise.runtime.transport.buffers import Buffer, ByteCounter, Workspace
from shardwise.runtime.transport.protocol import Realization, Transport, Work
from shardwise.runtime.transport.sends import SendTransport
from shardwise.schedule.traffic import Moved


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

    def allocate(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=device)

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
        """Summands of this rank's piece."""
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
