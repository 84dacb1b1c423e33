"""`WaitTransport`: collectives of a group whose other ranks do not exist, each a wait of a given length.

With it one rank's real share of a layout runs alone: its program, ledger and buffers are the real ones. Results are
plausible, not right: a sum is this rank's part of it, a gather repeats its piece, and messages bring small numbers.
Making them counts toward the wait; on CUDA it comes before it.

Where the real transport does a collective's work inside `wait` (shared memory, and gloo on a host without spare cores)
the wait begins there; where it works in the background, at the issue, and `wait` lasts until the predicted end. On CUDA
both happen in streams, as with NCCL: the collective is a timed kernel of a side stream, and `wait` lets the current
stream wait for it.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout import Mesh
from shardwise.layout.algorithms import Carried
from shardwise.layout.axes import Axes
from shardwise.layout.unit import Backend
from shardwise.runtime.transport.buffers import Target, Workspace, add_up
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.protocol import DONE, Realization, Transport, Work
from shardwise.schedule.traffic import Moved

Seconds = Callable[[str, int, tuple[int, ...]], float]
"""(operation of the ledger, bytes of the full tensor, ranks of the group) -> seconds from the last rank's arrival to
the end. Of a message, its receiver's seconds."""

SPIN = 2e-4
"""Seconds before the end of a wait from which the host spins: it sleeps too long by about a quarter of that."""
CYCLES = 20_000_000
"""Length of the kernel with which the device's clock is measured."""
SPREAD = 0.02
"""Scale of the numbers that messages bring: that of activations and gradients of a fresh model."""


class Timer(Protocol):
    """Start of a wait, on a host or on a device."""

    def start(self, seconds: float, make: Callable[[], object], tensors: Sequence[Tensor], last: bool) -> Work:
        """A collective that lasts `seconds`, inside which `make` makes its result. last: by `wait`, and not before."""


class HostTimer:
    """Waits of the host. background: collectives continue while the rank computes."""

    def __init__(self, background: bool) -> None:
        self.background = background

    def start(self, seconds: float, make: Callable[[], object], tensors: Sequence[Tensor], last: bool) -> Work:
        return HostWait(seconds, make, time.perf_counter() if self.background else None)


class HostWait:
    """A collective that ends `seconds` after `started`, or, with None, after `wait` is called."""

    def __init__(self, seconds: float, make: Callable[[], object], started: float | None) -> None:
        self._seconds, self._make, self._started = seconds, make, started

    def wait(self) -> None:
        ends = (time.perf_counter() if self._started is None else self._started) + self._seconds
        self._make()
        wait_until(ends)

    def is_completed(self) -> bool:
        return self._started is not None and time.perf_counter() >= self._started + self._seconds


def wait_until(ends: float) -> None:
    """Sleep until `ends` on the clock of `time.perf_counter`, to within some microseconds."""
    left = ends - time.perf_counter()
    if left > SPIN:
        time.sleep(left - SPIN)
    while time.perf_counter() < ends:
        pass


class DeviceTimer:
    """Waits of a CUDA device for one group: timed kernels, one after another, in a stream beside the computation.

    rate: cycles per second of the device's timed kernel.
    """

    def __init__(self, device: torch.device, rate: float) -> None:
        self.stream, self._rate = torch.cuda.Stream(device), rate

    def start(self, seconds: float, make: Callable[[], object], tensors: Sequence[Tensor], last: bool) -> Work:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if not last:
                make()
            torch.cuda._sleep(max(1, round(seconds * self._rate)))
            done = torch.cuda.Event()
            done.record()
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self.stream)
        return DeviceWait(done, make if last else None)


class DeviceWait:
    """A collective that ends with an event of a side stream. make: called when it has ended, in the current stream."""

    def __init__(self, done: torch.cuda.Event, make: Callable[[], object] | None) -> None:
        self._done, self._make = done, make

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)
        if self._make is not None:
            self._make()
            self._make = None

    def is_completed(self) -> bool:
        return bool(self._done.query())


def device_timer(device: torch.device) -> Callable[[], Timer]:
    """What makes timers of a device, whose clock is measured once."""
    return partial(DeviceTimer, device, cycles_per_second(device))


def cycles_per_second(device: torch.device) -> float:
    """Rate at which the device's timed kernel counts, measured on one that lasts some milliseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES)  # brings the clock up
    start.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    torch.cuda.synchronize(device)
    return CYCLES / (start.elapsed_time(end) / 1e3)


class WaitTransport(Transport):
    """One rank's end of a group of ranks. place: the rank's own in the group."""

    def __init__(self, ranks: tuple[int, ...], place: int, seconds: Seconds, timer: Timer) -> None:
        self.ranks, self.place, self._seconds, self._timer = ranks, place, seconds, timer
        self._numbers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def how(self, op: str, full: Tensor) -> Realization:
        return Realization("waits", isinstance(self._timer, HostTimer) and not self._timer.background)

    def _begin(
        self, op: str, nbytes: int, make: Callable[[], object], tensors: Sequence[Tensor], last: bool = False
    ) -> Work:
        return self._timer.start(self._seconds(op, nbytes, self.ranks), make, tensors, last)

    # -- collectives

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False, at_once: bool = False) -> Work:
        return self._begin("all_reduce", tensor.nbytes, nothing, [tensor])

    def all_gather(self, out: Tensor, piece: Tensor, *, at_once: bool = False) -> Work:
        def make() -> None:
            pieces = out.view(len(self.ranks), -1)
            own = pieces[self.place]
            if own.data_ptr() != piece.data_ptr():
                own.copy_(piece.reshape(-1))
            for place, part in enumerate(pieces):
                if place != self.place:
                    part.copy_(own)

        return self._begin("all_gather_into", out.nbytes, make, [out, piece])

    def reduce_scatter(self, full: Tensor, into: Callable[[], Target]) -> Work:
        def make() -> None:
            target, own = into(), full.view(len(self.ranks), -1)[self.place]
            if target.adds or target.tensor.data_ptr() != own.data_ptr():
                add_up([own], target, None)

        return self._begin("reduce_scatter", full.nbytes, make, [full], last=True)

    def all_to_all(
        self, out: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], *, at_once: bool = False
    ) -> Work:
        """Every rank gives this one what it gives them, repeated or cut to the rows that are expected."""

        def make() -> None:
            for theirs, mine in zip(out.split(list(received)), tensor.split(list(sent)), strict=True):
                for start in range(0, len(theirs), max(1, len(mine))):
                    part = theirs[start : start + len(mine)] if len(mine) else theirs
                    part.copy_(mine[: len(part)]) if len(mine) else part.zero_()

        return self._begin("all_to_all", tensor.nbytes, make, [out, tensor])

    # -- messages

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Done: the receiver's seconds have the whole message, and each rank that sends one receives one."""
        return DONE

    def receive(self, out: Tensor, peer: int) -> Work:
        numbers = self._numbers_like(out)
        return self._begin("recv", out.nbytes, lambda: out.view(-1).copy_(numbers), [out])

    def _numbers_like(self, out: Tensor) -> Tensor:
        """As many small numbers, drawn once; zeros of a type without fractions."""
        key = out.dtype, out.device
        kept = self._numbers.get(key)
        if kept is None or len(kept) < out.numel():
            kept = torch.zeros(out.numel(), dtype=out.dtype, device=out.device)
            if out.dtype.is_floating_point:
                kept.normal_(0.0, SPREAD)
            self._numbers[key] = kept
        return kept[: out.numel()]

    def run_schedule(
        self, carried: Carried, flat: Tensor, start: int, width: int, workspace: Workspace, maximum: bool
    ) -> Moved:
        raise NotImplementedError("a wait has no rounds: a layout that names an algorithm is not measured")


class ShareComms(Comms):
    """`Comms` of one rank of a layout, whose collectives are waits: whatever processes there are, none of them is a
    peer. rank: of the layout. timer: makes a group's. backend: what the real ranks would use."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        axes: tuple[Axes, ...],
        seconds: Seconds,
        timer: Callable[[], Timer],
        backend: Backend,
    ) -> None:
        def connect(group: object, ranks: tuple[int, ...]) -> Transport:
            return WaitTransport(ranks, ranks.index(rank), seconds, timer())

        super().__init__(mesh, rank, axes, timeout=60.0, backend=backend, connect=connect)
        self.moves_data = True

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Any group: no transport of this class uses it."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD


def nothing() -> None:
    """No-op: a sum is this rank's part of it."""
