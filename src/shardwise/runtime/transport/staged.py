"""`StagedTransport`: collectives of CUDA tensors between ranks that share a device, through the host's memory.

NCCL refuses two ranks on one device. Here a tensor is copied to pinned memory, the transport of CPU ranks carries it,
and the result is copied back. Both copies are in the stream that is current where they are made, and the host waits for
them: what was queued before a collective's `wait` is in the first, and what follows `wait` finds the second. It is for
testing programs of several ranks on one device: it is slow, and nothing moves while a rank computes.

A collective runs inside `wait`, one at a time, so all of a rank's groups share one buffer. Messages leave, and receives
are posted, at once, each with memory of its own until `wait`, which counts nowhere, like that of `Mail`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.layout.algorithms import Carried
from shardwise.layout.transport_buffers import STAGED, SUMMED_FROM, aligned, staging_bytes
from shardwise.runtime.transport.buffers import ByteCounter, Target, Workspace
from shardwise.runtime.transport.protocol import Realization, Transport, Work
from shardwise.runtime.transport.shared_collective import unwatched
from shardwise.schedule.traffic import Moved

_MESSAGES = frozenset({"send", "recv"})


class StagingMemory:
    """Host memory of one rank's staged collectives: a buffer as large as the largest so far. `tally` counts it, as
    `comm`."""

    def __init__(self) -> None:
        self.tally = ByteCounter()
        self.workspace = Workspace()
        """Room of schedules on the host, which counts nowhere: gloo's alone need it."""
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int, pinned: bool) -> StagingArea:
        """The buffer, with at least so many bytes of undefined content. The collective before must be over."""
        if self._buffer.numel() < nbytes:
            self.tally.add("comm", nbytes - self._buffer.numel())
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._buffer = host_memory(nbytes, torch.uint8, pinned)
        return StagingArea(self._buffer)


class StagingArea:
    """Parts of a staging buffer, cut off one after another."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._at = buffer, 0

    def cut(self, elements: int, dtype: torch.dtype) -> Tensor:
        """The next part: a flat tensor of undefined content."""
        start, self._at = self._at, self._at + aligned(elements * dtype.itemsize)
        return self._buffer[start : start + elements * dtype.itemsize].view(dtype)

    def copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.cut(tensor.numel(), dtype or tensor.dtype).copy_(tensor.reshape(-1))


class StagedTransport(Transport):
    """One rank's end of a group of ranks that may share devices.

    inner: transport of the group's CPU tensors, which also carries what is in the host's memory already. ranks: of the
    group. memory: the rank's.
    """

    def __init__(self, inner: Transport, ranks: int, memory: StagingMemory) -> None:
        self._inner, self._ranks, self._memory = inner, ranks, memory

    def stages(self, tensor: Tensor) -> bool:
        """Whether the inner transport cannot carry a tensor where it is."""
        return tensor.is_cuda

    def how(self, op: str, full: Tensor) -> Realization:
        inner = self._inner.how(op, full)
        if not self.stages(full):
            return inner
        return Realization(inner.algorithm + STAGED, op not in _MESSAGES)

    def watch(self, look: Callable[[], object]) -> None:
        self._inner.watch(look)

    def abort(self) -> None:
        self._inner.abort()

    def rest(self, resting: bool) -> None:
        self._inner.rest(resting)

    def close(self) -> None:
        self._inner.close()

    def _take(self, op: str, full: Tensor) -> StagingArea:
        """Room for one collective on a full tensor."""
        nbytes = staging_bytes(op, full.nbytes, self._ranks, full.element_size())
        return self._memory.take(nbytes, full.is_cuda)

    # -- collectives

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False, at_once: bool = False) -> Work:
        if not self.stages(tensor):
            return self._inner.all_reduce(tensor, maximum=maximum, at_once=at_once)

        def run() -> None:
            host = self._take("all_reduce", tensor).copy(tensor)
            self._inner.all_reduce(host, maximum=maximum).wait()
            tensor.view(-1).copy_(host)

        return _Deferred(run)

    def all_gather(self, out: Tensor, piece: Tensor, *, at_once: bool = False) -> Work:
        if not self.stages(out):
            return self._inner.all_gather(out, piece, at_once=at_once)

        def run() -> None:
            area = self._take("all_gather_into", out)
            host, own = area.cut(out.numel(), out.dtype), area.copy(piece, out.dtype)
            self._inner.all_gather(host, own).wait()
            out.view(-1).copy_(host)

        return _Deferred(run)

    def reduce_scatter(self, full: Tensor, into: Callable[[], Target]) -> Work:
        if not self.stages(full):
            return self._inner.reduce_scatter(full, into)
        return _Deferred(lambda: self._reduce_scatter(full, into()))

    def _reduce_scatter(self, full: Tensor, target: Target) -> None:
        """Added up on the host in the target's precision, to what is there: the bits that the inner transport gives."""
        area, (result, adds) = self._take("reduce_scatter", full), target
        host = area.copy(full)
        if not self.stages(result):  # an accumulator in the host's memory
            self._inner.reduce_scatter(host, lambda: target).wait()
            return
        assert result.element_size() <= max(SUMMED_FROM, full.element_size())
        total = area.copy(result) if adds else area.cut(result.numel(), result.dtype)
        self._inner.reduce_scatter(host, lambda: Target(total, adds)).wait()
        result.copy_(total)

    def all_to_all(
        self, out: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], *, at_once: bool = False
    ) -> Work:
        if not self.stages(tensor):
            return self._inner.all_to_all(out, tensor, received, sent, at_once=at_once)

        def run() -> None:
            area = self._memory.take(aligned(tensor.nbytes) + aligned(out.nbytes), tensor.is_cuda)
            given, arrived = area.copy(tensor), area.cut(out.numel(), out.dtype)
            self._inner.all_to_all(arrived.view(out.shape), given.view(tensor.shape), received, sent).wait()
            out.view(-1).copy_(arrived)

        return _Deferred(run)

    def run_schedule(
        self, carried: Carried, flat: Tensor, start: int, width: int, workspace: Workspace, maximum: bool
    ) -> Moved:
        if not self.stages(flat):
            return self._inner.run_schedule(carried, flat, start, width, workspace, maximum)
        # The inner transport has a tensor that consists of the run alone.
        rows = flat.view(carried.pieces, -1)[:, start : start + width]
        host = self._memory.take(aligned(rows.numel() * rows.element_size()), flat.is_cuda).copy(rows)
        alone = carried._replace(elements=rows.numel(), shared=False)
        moved = self._inner.run_schedule(alone, host, 0, width, self._memory.workspace, maximum)
        rows.copy_(host.view(rows.shape))
        return moved

    # -- messages

    def send(self, tensor: Tensor, peer: int) -> Work:
        if not self.stages(tensor):
            return self._inner.send(tensor, peer)
        host = host_memory(tensor.numel(), tensor.dtype, tensor.is_cuda)
        with unwatched(), torch.no_grad():
            host.copy_(tensor.view(-1))
        return _Message(self._inner.send(host, peer), host, None)

    def receive(self, out: Tensor, peer: int) -> Work:
        if not self.stages(out):
            return self._inner.receive(out, peer)
        host = host_memory(out.numel(), out.dtype, out.is_cuda)
        return _Message(self._inner.receive(host, peer), host, out)


def host_memory(elements: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    """A flat tensor of undefined content in the host's memory, which no measurement of a step counts."""
    # Generation computes in inference mode, whose tensors could not be written outside it.
    with torch.inference_mode(False), unwatched():
        return torch.empty(elements, dtype=dtype, pin_memory=pinned)


class _Deferred:
    """A collective that runs inside `wait`. Its memory on the host is not the engine's, whose storages are counted."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    def wait(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            with unwatched(), torch.no_grad():
                run()

    def is_completed(self) -> bool:
        return self._run is None


class _Message:
    """A message under way, in memory of the host. out: where one that arrives goes."""

    def __init__(self, work: Work, host: Tensor, out: Tensor | None) -> None:
        self._work: Work | None = work
        self._host, self._out = host, out

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        work.wait()
        if self._out is not None:
            with unwatched(), torch.no_grad():
                self._out.view(-1).copy_(self._host)

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()
