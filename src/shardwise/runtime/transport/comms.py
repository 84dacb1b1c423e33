"""Every collective of the runtime goes through `Comms`, which writes the ledger and measures time.

A ledger entry is the *logical* collective: phase, operation, mesh axes, unit or reason, dtype, elements of the padded
full tensor. How it is realised is the transport's business: on gloo a reduce-scatter is an all-to-all and a local sum
in rank order, because gloo's own is slower than its all-reduce and sums bf16 in bf16.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout import Mesh
from shardwise.layout.algorithms import Carried, Schedules
from shardwise.layout.axes import PP, Axes
from shardwise.layout.units import Backend
from shardwise.report.step_report import LedgerRow, Phase, TransportRow
from shardwise.runtime.job.pulse import Pulse
from shardwise.runtime.torch_versions import all_gather_single, reduce_scatter_single
from shardwise.runtime.transport import Mail, SharedTransport
from shardwise.runtime.transport.adding import Target, add_up, wide_room
from shardwise.runtime.transport.scheduled import ScheduledCollective, ScheduleRunner, Workspace
from shardwise.runtime.transport.shared import EXCHANGES, MESSAGES, PIECE
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


@dataclass
class Timing:
    """Seconds over all entries of one ledger row, and how it was realised."""

    key: Key
    algorithm: str
    count: int = 0
    time: float = 0.0
    wait: float = 0.0
    moved: Moved | None = None
    """What this rank sent, where a schedule of the layout's ran."""

    def add(self, moved: Moved) -> None:
        """One run of a schedule."""
        nbytes, steps = self.moved or (0, 0)
        self.moved = Moved(nbytes + moved.nbytes, steps + moved.steps)

    @property
    def sent(self) -> tuple[int | None, int | None]:
        """(bytes sent, steps); None where the transport does not tell."""
        return (None, None) if self.moved is None else (self.moved.nbytes, self.moved.steps)


class Waitable(Protocol):
    """Protocol of a pending or lazy collective."""

    def wait(self) -> None: ...

    def arrived(self) -> bool:
        """Whether it is complete, or this rank could complete it now without waiting, as far as can be told."""


class PendingCollective:
    """A collective in progress. `wait` returns when its result may be read; waiting twice is allowed."""

    def __init__(
        self,
        works: list[Any],
        finish: Callable[[], object] | None,
        timing: Timing | None,
        issued: float,
        settle: float = 0.0,
        pulse: Pulse | None = None,
        words: str | None = None,
        flight: CollectiveObserver | None = None,
    ) -> None:
        self._works, self._finish, self._timing, self._issued = works, finish, timing, issued
        self._settle, self._pulse, self._words, self._flight = settle, pulse, words, flight
        self._done = False
        if flight is not None:
            flight.follow(works)

    def wait(self) -> None:
        if self._done:
            return
        started = time.perf_counter()
        if self._pulse is not None:
            self._pulse.wait(self._words)
        if self._flight is not None:
            self._flight.awaited()
        for work in self._works:
            work.wait()
        if self._flight is not None:
            self._flight.arrived()
        if self._pulse is not None:
            self._pulse.work()
        if self._finish is not None:
            self._finish()
        if self._timing is not None:
            ended = time.perf_counter()
            self._timing.time += ended - self._issued
            self._timing.wait += ended - started
        self._done = True
        self._works, self._finish = [], None
        if self._settle:
            time.sleep(self._settle)

    def arrived(self) -> bool:
        """Whether it is complete by now, as far as the transport tells."""
        return all(work.is_completed() for work in self._works)


class LazyCollective:
    """Lazy collective, which runs inside `wait()`: nothing moves, and no time counts, before."""

    def __init__(self, issue: Callable[[], Waitable], arrived: Callable[[], bool] | None = None) -> None:
        self._issue: Callable[[], Waitable] | None = issue
        self._arrived = arrived

    def wait(self) -> None:
        if self._issue is not None:
            issue, self._issue = self._issue, None
            issue().wait()

    def arrived(self) -> bool:
        """Whether waiting for it would take no time but that of the work itself, as far as that can be told."""
        return self._issue is None or (self._arrived is not None and self._arrived())


DONE = PendingCollective([], None, None, 0.0)


class Comms:
    """The process groups of one rank's place in the mesh, and the ledger of what passed through them.

    axes: the groups that are wanted; only those with more than one rank get a process group, and a
    collective over one rank does nothing and leaves no entry. shared: all ranks are processes of one host and read each
    other's memory; else torch.distributed's backend carries everything. pulse: where signs of life go.
    Raises what torch.distributed raises when a peer is lost; `OSError`, on every rank, where memory cannot be shared.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        axes: tuple[Axes, ...],
        *,
        timeout: float,
        overlap: bool = True,
        shared: bool = False,
        pulse: Pulse | None = None,
    ) -> None:
        self.mesh, self.rank, self.overlap = mesh, rank, overlap
        self.pulse = pulse or Pulse()
        self.backend = cast(Backend, "shared" if shared else dist.get_backend())
        self.phase: Phase = "forward"
        self.timings: dict[Key, Timing] = {}
        self.quick = False
        """Whether small sums and gathers are done at once, without work around them: nobody computes gradients then."""
        self.settle = 0.0
        """Seconds to stand still after each wait: gloo's thread holds on to a collective's buffers a moment longer than
        its result takes to arrive, and who measures memory wants to see them go."""
        self.timeline: Observer | None = None
        """Who wants to see each collective go and come, in a recorded step."""
        self._recording = False
        self._last: str | None = None
        self._words: dict[tuple[str, Axes, str, str], str] = {}
        self._groups: dict[Axes, dist.ProcessGroup] = {}
        self._shared: dict[Axes, SharedTransport] = {}
        by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {}
        transports: dict[tuple[int, ...], SharedTransport] = {}
        if shared:
            # All ranks of the job meet first: either memory can be shared in every group, or it is in none.
            assert dist.group.WORLD is not None
            world = tuple(range(dist.get_world_size()))
            by_ranks[world], transports[world] = dist.group.WORLD, SharedTransport(dist.group.WORLD, timeout)
        for name in axes:
            ranks = mesh.group(name, rank)
            if len(ranks) == 1:
                continue
            if ranks not in by_ranks:
                by_ranks[ranks] = self._make_group(ranks, timeout)
                if shared:
                    transports[ranks] = SharedTransport(by_ranks[ranks], timeout)
            self._groups[name] = by_ranks[ranks]
            if shared:
                self._shared[name] = transports[ranks]
        self.schedules = Schedules(mesh, self.backend)
        """The schedules that the layout names for collectives."""
        self.workspace = Workspace()
        self._runners: dict[Axes, ScheduleRunner] = {}
        self._mails: dict[tuple[SharedTransport, int], Mail] = {}
        self._down: dict[Axes, dist.ProcessGroup] = {}
        """Groups of messages to lower ranks, along axes on which ranks send both ways at a time."""
        if self.backend == "nccl" and PP in self._groups:
            self._down[PP] = self._new_group(mesh.group(PP, rank), timeout)

    def _make_group(self, ranks: tuple[int, ...], timeout: float) -> dist.ProcessGroup:
        if len(ranks) == dist.get_world_size() and list(ranks) == sorted(ranks):
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        return self._new_group(ranks, timeout)

    def _new_group(self, ranks: tuple[int, ...], timeout: float) -> dist.ProcessGroup:
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def rest(self, resting: bool) -> None:
        """Whether what this rank waits for is unlikely to come soon: it then leaves its core alone meanwhile."""
        for transport in self._shared.values():
            transport.patience.rests = resting

    def close(self) -> None:
        """Give back what was shared with other ranks."""
        for transport in {id(found): found for found in self._shared.values()}.values():
            transport.close()
        for mail in self._mails.values():
            mail.close()

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
        """The recorded rows, sorted."""
        return tuple(sorted(LedgerRow(*key, count=timing.count) for key, timing in self.timings.items()))  # type: ignore[arg-type]

    def transport(self) -> tuple[TransportRow, ...]:
        """How each ledger row was realised here, and how long it took and kept the rank waiting."""
        keys = sorted(self.timings)
        return tuple(
            TransportRow(i, t.algorithm, *t.sent, t.time, t.wait) for i, t in enumerate(self.timings[k] for k in keys)
        )

    @property
    def last(self) -> str | None:
        """The latest collective in words, for the message of a rank that lost a peer."""
        return self._last

    def _record(self, op: str, axes: Axes, unit: str, full: Tensor, elements: int, algorithm: str) -> Timing | None:
        named = op, axes, unit, self.phase
        self._last = self._words.get(named)
        if self._last is None:
            self._last = self._words[named] = f"{op} over {self.mesh.name(axes)} for {unit} in {self.phase}"
        self.pulse.collective(self._last)
        if not self._recording:
            return None
        key = (self.phase, op, self.mesh.name(axes), unit, str(full.dtype).removeprefix("torch."), elements)
        timing = self.timings.setdefault(key, Timing(key, algorithm))
        timing.count += 1
        return timing

    def _issue(
        self,
        start: Callable[[], Any],
        timing: Timing | None,
        later: bool,
        finish: Callable[[], object] | None = None,
        deferred: bool = False,
        arrived: Callable[[], bool] | None = None,
    ) -> Waitable:
        """Start a collective, and wait for it unless it is wanted `later`. deferred: it is done by waiting for it, and
        `arrived` says whether the others are there."""
        at_once = not (later and self.overlap)
        if deferred and not at_once:
            words = self._last
            return LazyCollective(lambda: self._started(start, timing, True, finish, words), arrived)
        pending = self._started(start, timing, at_once, finish, self._last)
        if at_once:
            pending.wait()
        return pending

    def _at_once(self, act: Callable[[], object], timing: Timing | None) -> None:
        """Do what waits for the others by itself."""
        started = time.perf_counter()
        self.pulse.wait()
        act()
        self.pulse.work()
        if timing is not None:
            seconds = time.perf_counter() - started
            timing.time += seconds
            timing.wait += seconds

    def _started(
        self,
        start: Callable[[], Any],
        timing: Timing | None,
        at_once: bool,
        finish: Callable[[], object] | None,
        words: str | None,
    ) -> PendingCollective:
        flight = None if self.timeline is None or timing is None else self.timeline.issue(timing.key, at_once)
        issued = time.perf_counter()
        return PendingCollective([start()], finish, timing, issued, self.settle, self.pulse, words, flight)

    # -- the collectives

    def size(self, axes: Axes) -> int:
        return self.mesh.size(axes)

    def index(self, axes: Axes) -> int:
        """This rank's place in its group over `axes`."""
        return self.mesh.index(axes, self.rank)

    def all_reduce(
        self, tensor: Tensor, axes: Axes, unit: str, *, maximum: bool = False, later: bool = False
    ) -> Waitable:
        """Sum (or maximum) over the group, in place. With `later` the result is ready after `wait()`."""
        if axes not in self._groups:
            return DONE
        if carried := self._carried("all_reduce", axes, tensor):
            return self._by_schedule("all_reduce", axes, unit, carried, tensor, later, maximum=maximum)
        timing = self._record("all_reduce", axes, unit, tensor, tensor.numel(), self.backend)
        if axes in self._shared:
            transport = self._shared[axes]
            if self.quick and not later and transport.quick.sums(tensor):
                self._at_once(partial(transport.quick.all_reduce, tensor, maximum=maximum), timing)
                return DONE
            return self._issue(lambda: transport.all_reduce(tensor, maximum=maximum), timing, later, deferred=True)
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        return self._issue(lambda: dist.all_reduce(tensor, op, self._groups[axes], async_op=True), timing, later)

    def borrow(self, wanted: dict[str, int], dtype: torch.dtype, axes: Axes) -> dict[str, Tensor]:
        """Memory that is gathered into over `axes`, for as many elements as are `wanted`, where the group's ranks can
        read it in place; nothing where they cannot. All of them ask at the same time. It is there until `close`."""
        if axes not in self._shared:
            return {}
        found = {}
        with suppress(OSError):
            found = {name: self._shared[axes].empty(elements, dtype) for name, elements in wanted.items()}
        every: list[Any] = [None] * self.size(axes)
        dist.all_gather_object(every, len(found) == len(wanted), self._groups[axes])
        return found if all(every) else {}

    def all_gather(
        self, out: Tensor, piece: Tensor, axes: Axes, unit: str, *, later: bool = False, lent: bool = False
    ) -> Waitable:
        """Concatenate every rank's flat `piece`, in the dtype of `out`, into `out` in group order. It may be its place
        there. lent: the memory is one that `borrow` gave."""
        if axes not in self._groups:
            if out.data_ptr() != piece.data_ptr():
                out.copy_(piece.view_as(out))
            return DONE
        if carried := self._carried("all_gather_into", axes, out):
            return self._by_schedule("all_gather_into", axes, unit, carried, out, later, piece=piece)
        timing = self._record("all_gather_into", axes, unit, out, out.numel(), self.backend)
        if axes in self._shared:
            transport = self._shared[axes]
            if self.quick and not later and piece.nbytes <= PIECE:
                self._at_once(partial(transport.quick.all_gather, out, piece), timing)
                return DONE
            if lent:
                # Peers may read from now on, whenever this rank does.
                flights = transport.all_gather(out, piece, lent=True)
                return self._issue(lambda: flights, timing, later, deferred=True)
            return self._issue(lambda: transport.all_gather(out, piece), timing, later, deferred=True)
        group = self._groups[axes]
        if piece.dtype != out.dtype:
            index = self.index(axes)
            piece = out.view(-1)[index * piece.numel() : (index + 1) * piece.numel()].copy_(piece.reshape(-1))
        return self._issue(
            lambda: all_gather_single(out.view(-1), piece.reshape(-1), group, async_op=True), timing, later
        )

    def reduce_scatter(
        self,
        full: Tensor,
        axes: Axes,
        unit: str,
        into: Callable[[], Target],
        *,
        done: Callable[[], object] | None = None,
        scratch: Tensor | None = None,
        later: bool = False,
        lent: bool = False,
    ) -> Waitable:
        """Sum `full` over the group and put this rank's piece where `into` says, which is asked when the sum is made.

        full: flat, its size divisible by the group's; its content is undefined afterwards. done: told when the piece is
        there. scratch: as many elements as `full`, where peers' pieces are received on gloo. lent: `full` lies in
        memory that `borrow` gave, and may be written again after `release`.
        """
        group = self._groups[axes]
        ranks = self.size(axes)
        piece = full.numel() // ranks
        if carried := self._carried("reduce_scatter", axes, full):
            return self._by_schedule("reduce_scatter", axes, unit, carried, full, later, into=into, done=done)
        if axes in self._shared:
            timing = self._record("reduce_scatter", axes, unit, full, full.numel(), self.backend)
            reduction = self._shared[axes].reduction(full, into, lent=lent)
            if lent:
                # Peers may read from now on, whenever this rank does.
                reduction.start()
                # Who measures memory wants all to happen at the same moments each time.
                arrived = None if self.settle else reduction.arrived
                return self._issue(lambda: reduction, timing, later, done, deferred=True, arrived=arrived)
            return self._issue(reduction.start, timing, later, done, deferred=True)

        def finish(pieces: list[Tensor]) -> None:
            target = into()
            add_up(pieces, target, wide_room(target, len(pieces)))
            if done is not None:
                done()

        if self.backend != "gloo":
            # NCCL, which sums bf16 in bf16; or a dry run of shared memory, which holds what that would.
            timing = self._record("reduce_scatter", axes, unit, full, full.numel(), self.backend)
            out = full.view(ranks, piece)[self.index(axes)]
            return self._issue(
                lambda: reduce_scatter_single(out, full, group=group, async_op=True),
                timing, later, lambda: finish([out] if self.backend == "nccl" else [out] * ranks),
            )  # fmt: skip
        timing = self._record("reduce_scatter", axes, unit, full, full.numel(), "all-to-all, sum in rank order")
        received = torch.empty_like(full) if scratch is None else scratch[: full.numel()]
        return self._issue(
            lambda: dist.all_to_all_single(received, full, group=group, async_op=True),
            timing, later, lambda: finish(list(received.view(ranks, piece))),
        )  # fmt: skip

    def _carried(self, op: str, axes: Axes, full: Tensor) -> Carried | None:
        """How a schedule of the layout's carries a collective on `full`; None where it runs as under auto."""
        if not self.schedules.named:
            return None
        return self.schedules.carried(op, axes, str(full.dtype).removeprefix("torch."), full.numel())

    def _by_schedule(
        self,
        op: str,
        axes: Axes,
        unit: str,
        carried: Carried,
        full: Tensor,
        later: bool,
        *,
        maximum: bool = False,
        piece: Tensor | None = None,
        into: Callable[[], Target] | None = None,
        done: Callable[[], object] | None = None,
    ) -> Waitable:
        """Any collective, by the schedule that the layout names; it runs where it is waited for."""
        timing = self._record(op, axes, unit, full, full.numel(), carried.schedule.algorithm)
        if axes not in self._runners:
            self._runners[axes] = ScheduleRunner(self._groups[axes], self._shared.get(axes), self.workspace)
        runner, flat = self._runners[axes], full.view(-1)
        runner.check(carried.schedule)

        def start() -> ScheduledCollective:
            if piece is not None:
                n = piece.numel()
                own = flat[runner.rank * n : (runner.rank + 1) * n]
                if own.data_ptr() != piece.data_ptr():
                    own.copy_(piece.reshape(-1))
            return ScheduledCollective(runner, carried, flat, timing.add if timing else _forget, maximum, into)

        return self._issue(start, timing, later, done, deferred=True)

    def release(self, full: Tensor, axes: Axes) -> None:
        """Wait until nobody reads a tensor that was given to a reduction as `lent`."""
        if axes in self._shared:
            self._shared[axes].release(full)

    def read(self, scalar: Tensor) -> float:
        """The number in a tensor of one element, on the host. The one place where the program looks at data."""
        if self.backend != "nccl" or not self._last:
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
    ) -> Waitable:
        """Give each rank of the group its rows of `tensor` [n, ...], and have theirs in `out` [m, ...], in group order.

        sent, received: rows for and from each rank, 0 allowed; equal parts where they are left out. Both
        tensors are contiguous and of one dtype. The ledger has the elements that this rank gives away. Raises
        `ValueError` where the rows are not those of the tensors.
        """
        ranks, mine = self.size(axes), self.index(axes)
        sent, received = _rows(tensor, sent, ranks), _rows(out, received, ranks)
        if sent[mine] != received[mine] or tensor.shape[1:] != out.shape[1:] or tensor.dtype != out.dtype:
            raise ValueError(f"{tensor.dtype} {sent} of {list(tensor.shape)} are not {out.dtype} {list(out.shape)}")
        if axes not in self._groups:
            out.copy_(tensor)
            return DONE
        timing = self._record("all_to_all", axes, unit, tensor, tensor.numel(), self.backend)
        if axes in self._shared:
            mail, into, parts = self._mail(axes, EXCHANGES), out.split(received), tensor.split(sent)
            return self._issue(lambda: mail.all_to_all(into, parts), timing, later)
        group = self._groups[axes]
        return self._issue(
            lambda: dist.all_to_all_single(out, tensor, received, sent, group, async_op=True), timing, later
        )

    # -- messages

    def send(self, tensor: Tensor, axes: Axes, peer: int, unit: str) -> PendingCollective:
        """Hand a contiguous tensor to a rank of the group. It may be reused after `wait()`.

        peer: its place along `axes`. Messages between two ranks arrive in the order in which they were sent.
        """
        timing = self._record("send", axes, unit, tensor, tensor.numel(), self.backend)
        if self.backend == "shared":
            mail = self._mail(axes, MESSAGES)
            return self._started(lambda: mail.send(tensor, peer), timing, False, None, self._last)
        to, group = self.mesh.group(axes, self.rank)[peer], self._way(axes, peer > self.index(axes))
        return self._started(lambda: dist.isend(tensor, to, group), timing, False, None, self._last)

    def receive(self, out: Tensor, axes: Axes, peer: int, unit: str) -> Waitable:
        """Have a contiguous tensor filled by a rank of the group; it may be read after `wait()`."""
        timing = self._record("recv", axes, unit, out, out.numel(), self.backend)
        if self.backend == "shared":
            mail = self._mail(axes, MESSAGES)
            return self._started(lambda: mail.receive(out, peer), timing, False, None, self._last)
        of, group = self.mesh.group(axes, self.rank)[peer], self._way(axes, peer < self.index(axes))
        return self._started(lambda: dist.irecv(out, of, group), timing, False, None, self._last)

    def _mail(self, axes: Axes, kind: int) -> Mail:
        transport = self._shared[axes]
        if (transport, kind) not in self._mails:
            self._mails[transport, kind] = Mail(transport, kind)
        return self._mails[transport, kind]

    def _way(self, axes: Axes, up: bool) -> dist.ProcessGroup:
        """The group of messages to higher, or to lower ranks: what NCCL sends to a rank waits for what came before."""
        return self._groups[axes] if up else self._down.get(axes, self._groups[axes])

    # -- along a dim of activations

    def gather_dim(self, x: Tensor, dim: int, axes: Axes, unit: str) -> Tensor:
        """All-gather local shards along `dim`: [.., n/ranks, ..] -> [.., n, ..]."""
        ranks = self.size(axes)
        out = x.new_empty((ranks, *x.shape))
        self.all_gather(out, x.contiguous(), axes, unit)
        if prod(x.shape[:dim]) == 1:
            return out.view(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])
        return out.movedim(0, dim).reshape(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])

    def reduce_scatter_dim(self, x: Tensor, dim: int, axes: Axes, unit: str) -> Tensor:
        """Sum over the group and keep this rank's piece along `dim`: [.., n, ..] -> [.., n/ranks, ..]."""
        ranks = self.size(axes)
        shape = (*x.shape[:dim], x.shape[dim] // ranks, *x.shape[dim + 1 :])
        pieces = x.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous()
        out = x.new_empty(shape)
        self.reduce_scatter(pieces.view(-1), axes, unit, lambda: Target(out.view(-1)))
        return out


def _forget(moved: Moved) -> None:
    """No-op: no step is recorded."""


def _rows(tensor: Tensor, rows: Sequence[int] | None, ranks: int) -> list[int]:
    """Rows of a tensor for each of `ranks` ranks. Raises `ValueError` where they are not all of its rows."""
    found = [len(tensor) // ranks] * ranks if rows is None else list(rows)
    if len(found) != ranks or sum(found) != len(tensor) or min(found) < 0:
        raise ValueError(f"{len(tensor)} rows are not {found} rows for {ranks} ranks")
    return found
