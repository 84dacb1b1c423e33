"""Every collective of the runtime goes through `Comms`, which writes the ledger and measures time.

A ledger entry is the *logical* collective: phase, operation, mesh axes, unit or reason, dtype, elements of the padded
full tensor. Its realization is the transport's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout import Mesh
from shardwise.layout.algorithms import Schedules
from shardwise.layout.axes import PP, SERVER, Axes
from shardwise.layout.unit import Backend
from shardwise.report.step_report import LedgerRow, Phase, TransportRow
from shardwise.runtime.job.pulse import Pulse
from shardwise.runtime.transport.buffers import ByteCounter, Target, Workspace, add_up
from shardwise.runtime.transport.process_group import ProcessGroupTransport, ScheduledCollective
from shardwise.runtime.transport.protocol import DONE, Realization, Transport, Work
from shardwise.runtime.transport.shared import SharedTransport
from shardwise.runtime.transport.staged import StagedTransport, StagingMemory
from shardwise.schedule.traffic import Moved

Key = tuple[str, str, str, str, str, int]


class CollectiveObserver(Protocol):
    """Callbacks for one collective in progress."""

    def follow(self, works: list[Any]) -> None:
        """It has been issued, as these works."""

    def awaited(self) -> None:
        """The rank stands still for it from now on."""

    def arrived(self) -> None:
        """The rank goes on."""


class Observer(Protocol):
    """Told of every collective of a recorded step."""

    def issue(self, key: Key, at_once: bool) -> CollectiveObserver:
        """A collective is about to be issued; at_once: the rank will wait for it without doing anything else first."""

    def copied(self, op: tuple[str, str], unit: str, spans: Sequence[tuple[int, int]]) -> None:
        """A copy between homes ran in these spans."""

    def for_disk(self) -> AbstractContextManager[None]:
        """The rank does nothing inside the context but wait for a disk."""


@dataclass
class Timing:
    """Seconds over all entries of one ledger row, and how it was realised."""

    key: Key
    algorithm: str
    count: int = 0
    time: float = 0.0
    wait: float = 0.0
    ranks: tuple[int, ...] = ()
    """The group's."""
    moved: Moved | None = None
    """Traffic of this rank, where a schedule of the layout's ran."""

    def add(self, moved: Moved) -> None:
        nbytes, steps = self.moved or (0, 0)
        self.moved = Moved(nbytes + moved.nbytes, steps + moved.steps)

    @property
    def sent(self) -> tuple[int | None, int | None]:
        """(bytes sent, steps); None where the transport does not tell."""
        return (None, None) if self.moved is None else (self.moved.nbytes, self.moved.steps)


class PendingCollective:
    """A collective in progress. `wait` returns when its result may be read; waiting twice is allowed.

    realization: of a lazy collective, time counts from `wait`. finish: called when the result is there.
    """

    def __init__(
        self,
        comms: Comms,
        start: Callable[[], Work],
        timing: Timing | None,
        realization: Realization,
        at_once: bool,
        finish: Callable[[], object] | None,
    ) -> None:
        self._comms, self._timing, self._lazy, self._finish = comms, timing, realization.lazy, finish
        self._words = comms.last
        self._flight: CollectiveObserver | None = None
        if not self._lazy:
            self._issue(at_once)
        comms.communicating = True
        self._work: Work | None = start()
        comms.communicating = False
        if self._flight is not None:
            self._flight.follow([self._work])

    def _issue(self, at_once: bool) -> None:
        if self._comms.timeline is not None and self._timing is not None:
            self._flight = self._comms.timeline.issue(self._timing.key, at_once)
        self._issued = time.perf_counter()

    def wait(self) -> None:
        work = self._work
        if work is None:
            return
        if self._lazy:
            self._issue(True)
        started = time.perf_counter()
        self._comms.pulse.wait(self._words)
        if self._flight is not None:
            self._flight.awaited()
        self._comms.communicating = True
        work.wait()
        self._comms.communicating = False
        if self._flight is not None:
            self._flight.arrived()
        self._comms.pulse.work()
        self._work = None
        if self._finish is not None:
            self._finish()
            self._finish = None
        if self._timing is not None:
            ended = time.perf_counter()
            self._timing.time += ended - self._issued
            self._timing.wait += ended - started
        if self._comms.pause and self._comms.moves_data:
            del work  # what it still refers to would count as memory
            time.sleep(self._comms.pause)

    def is_completed(self) -> bool:
        """Whether it is complete, or this rank could complete it now without waiting for others."""
        return self._work is None or self._work.is_completed()


Connect = Callable[[dist.ProcessGroup, tuple[int, ...]], Transport]
"""(a group, its ranks) -> the transport over it."""


class Comms:
    """The transports of one rank's groups in the mesh, and the ledger of what passed through them.

    axes: the requested groups; only those with more than one rank get a transport, and a collective over one rank does
    nothing and leaves no entry. shared: all ranks are processes of one host and read each other's memory; else
    torch.distributed's backend carries everything. staged: what carries the tensors of ranks that share GPUs, through
    the host and by either of these. pulse: receives heartbeats. backend, connect: another backend's name, and its
    transport over a group of ranks (for the dry run).
    Raises what torch.distributed raises when a peer is lost; `OSError`, on every rank, where memory cannot be shared.
    """

    communicating = False
    """Whether this rank is inside a collective, such as in the additions of a reduce-scatter."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        axes: tuple[Axes, ...],
        *,
        timeout: float,
        overlap: bool = True,
        shared: bool = False,
        staged: type[StagedTransport] | None = None,
        pulse: Pulse | None = None,
        backend: Backend | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.mesh, self.rank, self.overlap = mesh, rank, overlap
        self.pulse = pulse or Pulse()
        self.moves_data = connect is None
        """Whether tensors have values, so that the program may look at them; a dry run's have none."""
        self.backend = backend or cast(Backend, "staged" if staged else "shared" if shared else dist.get_backend())
        self.phase: Phase = "forward"
        self.timings: dict[Key, Timing] = {}
        self.quick = False
        """Whether small sums and gathers are done at once, without work around them: nobody computes gradients then."""
        self.pause = 0.0
        """Seconds to stand still after each wait: gloo's thread holds on to a collective's buffers a moment longer than
        its result takes to arrive, and who measures memory wants to see them go."""
        self.timeline: Observer | None = None
        """Observer of each collective of a recorded step."""
        self._recording = False
        self.last: str | None = None
        """The latest collective in words, for the message of a rank that lost a peer."""
        self._words: dict[tuple[str, Axes, str, str], str] = {}
        self.schedules = Schedules(mesh, self.backend)
        """The schedules that the layout names for collectives."""
        self.workspace, self.staging = Workspace(), StagingMemory()
        self._timeout, self._transports = timeout, dict[Axes, Transport]()
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        by_ranks: dict[tuple[Any, ...], Transport] = {}
        if shared:
            # All ranks of the job meet first: either memory can be shared in every group, or it is in none.
            assert dist.group.WORLD is not None
            by_ranks[tuple(range(dist.get_world_size()))] = SharedTransport(dist.group.WORLD, timeout)
        for name in axes:
            ranks = mesh.group(name, rank)
            if len(ranks) == 1:
                continue
            if ranks not in groups:
                groups[ranks] = self._group(ranks)
            # Ranks that read each other's memory have one for all names.
            key = ranks if self.backend == "shared" or shared else (*ranks, name)
            if key not in by_ranks:
                by_ranks[key] = self._connected(groups[ranks], ranks, name, connect, shared)
            transport = by_ranks[key]
            self._transports[name] = staged(transport, len(ranks), self.staging) if staged else transport

    def _connected(
        self, group: dist.ProcessGroup, ranks: tuple[int, ...], name: Axes, connect: Connect | None, shared: bool
    ) -> Transport:
        if connect:
            return connect(group, ranks)
        if shared:
            return SharedTransport(group, self._timeout)
        # What the engine reserves for its reductions is in use while activations are summed: one for each name. Along
        # the pipeline ranks send both ways at a time.
        down = self._new_group(ranks) if self.backend == "nccl" and name == PP else None
        return ProcessGroupTransport(group, ranks, dist.get_backend(), down)

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if len(ranks) == dist.get_world_size() and list(ranks) == sorted(ranks):
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        return self._new_group(ranks)

    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=self._timeout), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def rest(self, resting: bool) -> None:
        """Whether what this rank waits for is unlikely to come soon: it then leaves its core alone meanwhile."""
        for transport in self._transports.values():
            transport.rest(resting)

    def watch(self, look: Callable[[], object]) -> None:
        """Call `look` now and then while waiting for other ranks; it raises where one of them has failed."""
        for transport in self._transports.values():
            transport.watch(look)

    def abort(self) -> None:
        """This rank has failed: let no other one wait for it."""
        for transport in self._transports.values():
            transport.abort()

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()

    # -- the ledger

    def start_recording(self) -> None:
        """Forget earlier entries; what follows is one step."""
        self.timings = {}
        self._recording = True

    def stop_recording(self) -> None:
        self._recording = False

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def ledger(self) -> tuple[LedgerRow, ...]:
        return tuple(sorted(self.calls()))

    def calls(self) -> Iterator[LedgerRow]:
        """The ledger's rows in the order of their first calls."""
        return (LedgerRow(*key, count=timing.count) for key, timing in self.timings.items())  # type: ignore[arg-type]

    def transport(self) -> tuple[TransportRow, ...]:
        """Realization of each ledger row here, its time and the rank's waiting."""
        keys = sorted(self.timings)
        return tuple(
            TransportRow(i, t.algorithm, *t.sent, t.time, t.wait) for i, t in enumerate(self.timings[k] for k in keys)
        )

    def copied(
        self, op: tuple[str, str], unit: str, dtype: torch.dtype, elements: int, spans: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Enter a copy between homes into the ledger. op: one of `layout.homes`; spans: nanoseconds of the monotonic
        clock from and to which it ran, where these are apart from what the rank computed."""
        if self._recording:
            key = (self.phase, *op, unit, str(dtype).removeprefix("torch."), elements)
            timing = self.timings.setdefault(key, Timing(key, "copy"))
            timing.count += 1
            timing.time += sum(stop - start for start, stop in spans) / 1e9
        if self.timeline is not None:
            self.timeline.copied(op, unit, spans)

    @contextmanager
    def message(self, op: str, peer: str, tensor: Tensor) -> Iterator[None]:
        """Enter a message to or from a parameter server into the ledger; inside it is sent or awaited. op: push or
        pull; peer: which server."""
        self.last = f"{op} of {peer}"
        self.pulse.collective(self.last)
        self.pulse.wait()
        key = (self.phase, op, SERVER, peer, str(tensor.dtype).removeprefix("torch."), tensor.numel())
        flight = self.timeline.issue(key, True) if self.timeline is not None else None
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        if flight is not None:
            flight.arrived()
        self.pulse.work()
        if self._recording:
            timing = self.timings.setdefault(key, Timing(key, "message"))
            timing.count += 1
            timing.time += seconds
            timing.wait += seconds

    def _record(self, op: str, axes: Axes, unit: str, full: Tensor, algorithm: str) -> Timing | None:
        named = op, axes, unit, self.phase
        self.last = self._words.get(named)
        if self.last is None:
            self.last = self._words[named] = f"{op} over {self.mesh.name(axes)} for {unit} in {self.phase}"
        self.pulse.collective(self.last)
        if not self._recording:
            return None
        key = (self.phase, op, self.mesh.name(axes), unit, str(full.dtype).removeprefix("torch."), full.numel())
        if key not in self.timings:
            self.timings[key] = Timing(key, algorithm, ranks=self.mesh.group(axes, self.rank))
        self.timings[key].count += 1
        return self.timings[key]

    def _start(
        self,
        op: str,
        axes: Axes,
        unit: str,
        full: Tensor,
        start: Callable[..., Work],
        at_once: bool,
        *,
        finish: Callable[[], object] | None = None,
        piece: Tensor | None = None,
        into: Callable[[], Target] | None = None,
        maximum: bool = False,
        equal: bool = True,
    ) -> Work:
        """Record a collective and start it: by `start` of the transport, or by the schedule that the layout names.
        at_once: wait for it. equal: all ranks have tensors of one size."""
        transport, carried = self._transports[axes], None
        if self.schedules.named:
            carried = self.schedules.carried(op, axes, str(full.dtype).removeprefix("torch."), full.numel())
        realization = transport.how(op, full) if carried is None else Realization(carried.schedule.algorithm, True)
        timing = self._record(op, axes, unit, full, realization.algorithm)
        if carried is not None:
            start = partial(
                ScheduledCollective, transport, carried, full.view(-1), self.index(axes), self.workspace,
                timing.add if timing else _forget, maximum, piece, into,
            )  # fmt: skip
        elif (
            at_once
            and equal
            and finish is None
            and self.quick
            and transport.shortcut(op, (full if piece is None else piece).nbytes)
        ):
            self._shortcut(start, timing)
            return DONE
        pending = PendingCollective(self, start, timing, realization, at_once, finish)
        if at_once:
            pending.wait()
        return pending

    def _shortcut(self, start: Callable[..., Work], timing: Timing | None) -> None:
        """A small collective with next to nothing around it."""
        started = time.perf_counter()
        self.pulse.wait()
        start(at_once=True)
        self.pulse.work()
        if timing is not None:
            seconds = time.perf_counter() - started
            timing.time += seconds
            timing.wait += seconds

    # -- memory

    def allocate(self, elements: int, dtype: torch.dtype, device: torch.device, axes: Axes) -> Tensor:
        """A zeroed tensor in the memory that suits collectives over `axes` best; all their ranks call this together."""
        if axes not in self._transports:
            return torch.zeros(elements, dtype=dtype, device=device)
        return self._transports[axes].allocate(elements, dtype, device)

    def wait_readers(self, memory: Tensor, axes: Axes) -> None:
        """Wait until no peer reads a tensor that `allocate` gave, which may then be written."""
        if axes in self._transports:
            self._transports[axes].wait_readers(memory)

    def reserve(
        self, elements: int, dtype: torch.dtype, device: torch.device, axes: Axes, tally: ByteCounter
    ) -> list[Tensor]:
        """Prepare reduce-scatters over `axes` of up to so many elements; returns memory that the transport needs."""
        return self._transports[axes].reserve(elements, dtype, device, tally) if axes in self._transports else []

    # -- the collectives

    def size(self, axes: Axes) -> int:
        return self.mesh.size(axes)

    def index(self, axes: Axes) -> int:
        return self.mesh.index(axes, self.rank)

    def all_reduce(self, tensor: Tensor, axes: Axes, unit: str, *, maximum: bool = False, later: bool = False) -> Work:
        """Sum (or maximum) over the group, in place. With `later` the result is ready after `wait()`."""
        if axes not in self._transports:
            return DONE
        start = partial(self._transports[axes].all_reduce, tensor, maximum=maximum)
        return self._start("all_reduce", axes, unit, tensor, start, not (later and self.overlap), maximum=maximum)

    def all_gather(
        self,
        out: Tensor,
        piece: Tensor,
        axes: Axes,
        unit: str,
        *,
        done: Callable[[], object] | None = None,
        later: bool = False,
    ) -> Work:
        """Concatenate every rank's flat `piece`, in the dtype of `out`, into `out` in group order. It may be its place
        there. done: called when all of it is there."""
        if axes not in self._transports:
            if out.data_ptr() != piece.data_ptr():
                out.copy_(piece.view_as(out))
            if done is not None:
                done()
            return DONE
        start, at_once = partial(self._transports[axes].all_gather, out, piece), not (later and self.overlap)
        return self._start("all_gather_into", axes, unit, out, start, at_once, finish=done, piece=piece)

    def reduce_scatter(
        self,
        full: Tensor,
        axes: Axes,
        unit: str,
        into: Callable[[], Target],
        *,
        done: Callable[[], object] | None = None,
        later: bool = False,
    ) -> Work:
        """Sum `full` over the group and put this rank's piece where `into` says, called when the sum is made.

        full: flat, its size divisible by the group's; its content is undefined afterwards. In memory of `allocate` it
        may be written again after `wait_readers`. done: called when the piece is there.
        """
        if axes not in self._transports:
            target = into()
            if target.adds or target.tensor.data_ptr() != full.data_ptr():
                add_up([full], target, None)
            if done is not None:
                done()
            return DONE
        start, at_once = partial(self._transports[axes].reduce_scatter, full, into), not (later and self.overlap)
        return self._start("reduce_scatter", axes, unit, full, start, at_once, finish=done, into=into)

    def read(self, scalar: Tensor) -> float:
        """The number in a tensor of one element, on the host. The one place where the program looks at data."""
        if self.backend != "nccl" or not self.last:
            return float(scalar.item())
        # On a GPU collectives are only queued: this is where the host waits for them.
        self.pulse.wait()
        value = float(scalar.item())
        self.pulse.work()
        return value

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        axes: Axes,
        unit: str,
        *,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        later: bool = False,
    ) -> Work:
        """Give each rank of the group its rows of `tensor` [n, ...], and have theirs in `out` [m, ...], in group order.

        sent, received: rows for and from each rank, 0 allowed; equal parts where they are left out. Both
        tensors are contiguous and of one dtype. The ledger has the elements that this rank gives away. Raises
        `ValueError` where the rows are not those of the tensors.
        """
        ranks, mine, equal = self.size(axes), self.index(axes), sent is received is None
        sent, received = _rows(tensor, sent, ranks), _rows(out, received, ranks)
        if sent[mine] != received[mine] or tensor.shape[1:] != out.shape[1:] or tensor.dtype != out.dtype:
            raise ValueError(f"{tensor.dtype} {sent} of {list(tensor.shape)} are not {out.dtype} {list(out.shape)}")
        if axes not in self._transports:
            out.copy_(tensor)
            return DONE
        start = partial(self._transports[axes].all_to_all, out, tensor, received, sent)
        return self._start("all_to_all", axes, unit, tensor, start, not (later and self.overlap), equal=equal)

    def reachable(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy on this rank's device where the backend moves no other: NCCL, what is in the host's
        memory."""
        return tensor.cuda() if self.backend == "nccl" and not tensor.is_cuda else tensor

    # -- messages

    def send(self, tensor: Tensor, axes: Axes, peer: int, unit: str) -> Work:
        """Hand a contiguous tensor to a rank of the group. It may be reused after `wait()`.

        peer: its place along `axes`. Messages between two ranks arrive in the order in which they were sent.
        """
        return self._start("send", axes, unit, tensor, partial(self._transports[axes].send, tensor, peer), False)

    def receive(self, out: Tensor, axes: Axes, peer: int, unit: str) -> Work:
        """Have a contiguous tensor filled by a rank of the group; it may be read after `wait()`."""
        return self._start("recv", axes, unit, out, partial(self._transports[axes].receive, out, peer), False)


def gather_dim(comms: Comms, x: Tensor, dim: int, axes: Axes, unit: str) -> Tensor:
    """All-gather local shards along `dim`: [.., n/ranks, ..] -> [.., n, ..]."""
    ranks = comms.size(axes)
    out = x.new_empty((ranks, *x.shape))
    comms.all_gather(out, x.contiguous(), axes, unit)
    if prod(x.shape[:dim]) == 1:
        return out.view(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])
    return out.movedim(0, dim).reshape(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])


def reduce_scatter_dim(comms: Comms, x: Tensor, dim: int, axes: Axes, unit: str) -> Tensor:
    """Sum over the group and keep this rank's piece along `dim`: [.., n, ..] -> [.., n/ranks, ..]."""
    ranks = comms.size(axes)
    shape = (*x.shape[:dim], x.shape[dim] // ranks, *x.shape[dim + 1 :])
    pieces = x.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous()
    out = x.new_empty(shape)
    comms.reduce_scatter(pieces.view(-1), axes, unit, lambda: Target(out.view(-1)))
    return out


def waiting_for_disk(comms: Comms) -> AbstractContextManager[None]:
    """Tell the observer of a recorded step, if there is one."""
    return nullcontext() if comms.timeline is None else comms.timeline.for_disk()


def _forget(moved: Moved) -> None:
    """No-op: no step is recorded."""


def _rows(tensor: Tensor, rows: Sequence[int] | None, ranks: int) -> list[int]:
    """Rows of a tensor for each of `ranks` ranks. Raises `ValueError` where they are not all of its rows."""
    counts = [len(tensor) // ranks] * ranks if rows is None else list(rows)
    if len(counts) != ranks or sum(counts) != len(tensor) or min(counts) < 0:
        raise ValueError(f"{len(tensor)} rows are not {counts} rows for {ranks} ranks")
    return counts
