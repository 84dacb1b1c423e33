"""`Transport` between processes of one host, which read each other's memory.

It runs the same `CommSchedule` that is verified and priced, as its `rank_plan`. A tensor of `allocate` is read by the
peers where it is, from the moment a collective starts; of any other, what they must see is copied into a segment inside
`wait`. Nothing runs in the background: a rank's part of a collective is done by who waits for it. On a host whose cores
all compute there is nobody else who could.
"""

import os
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.layout.algorithms import Carried
from shardwise.runtime.transport.buffers import Target, Workspace
from shardwise.runtime.transport.mail import AREA, FLAGS, Mail, Quick
from shardwise.runtime.transport.memory import Peer, SharedSegment, SpinWait, can_share, network
from shardwise.runtime.transport.plan import RankPlan, rank_plan
from shardwise.runtime.transport.process_group import gather_objects
from shardwise.runtime.transport.protocol import DONE, Realization, Transport, Work
from shardwise.runtime.transport.shared_collective import (
    PIECE,
    SLOTS,
    WORDS,
    AddsUp,
    Array,
    Flights,
    Reduction,
    SharedCollective,
    StagingBuffer,
    Window,
    location,
    word_of,
)
from shardwise.schedule import CommSchedule, build
from shardwise.schedule.traffic import Moved

_TOKEN = WORDS - 1
MESSAGES, EXCHANGES = 3, 4
"""Words of the first line that say where a rank's mail is (`Mail`), one for each kind."""
TWO_SHOT_FROM = 32 << 10
"""Bytes from which an all-reduce of two ranks reads each part once and not twice: `shardwise collective bench`."""
_EAGER = frozenset({"send", "recv", "all_to_all"})
_SHORTCUTS = {"all_reduce": AREA, "all_gather_into": PIECE, "all_to_all": AREA}
"""Most bytes of a tensor, or a piece of it, for which `Quick` is quicker: starting a flight takes longer than reading
some kilobytes twice."""


class SharedTransport(Transport):
    """One rank's end of a group of processes on one host.

    group: their process group, over which they meet here; every member must make the transport. timeout: seconds that a
    rank waits for another. Raises `OSError` on every rank when they cannot share memory.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._segments: dict[int, SharedSegment] = {}
        self.peers: list[Peer] = []
        self._sequence = 0
        self._stages = [StagingBuffer(self._segment), StagingBuffer(self._segment)]
        self._arrays: dict[tuple[int, int, Any], Array] = {}
        self._aside = np.empty(0, np.uint8)
        self._sequence_of_stages = 0
        self._open: list[SharedSegment] = []
        self._lent: dict[int, Flights] = {}
        """By address: what peers may still be reading there."""
        self.started: deque[SharedCollective] = deque()
        self.spin = SpinWait(self.ranks, len(os.sched_getaffinity(0)), timeout)
        # What nobody closed goes with the transport: a process may make many.
        self._let_go = weakref.finalize(self, _let_go, self._segments, self.peers)
        self._mails: dict[int, Mail] = {}
        self._meet(group)

    def _meet(self, group: dist.ProcessGroup) -> None:
        """Tell the others where this rank's flags are, and map theirs; all succeed or all fail."""
        ranks = dist.get_process_group_ranks(group)
        endpoint: Any = can_share()
        if endpoint is None:
            try:
                for stage in self._stages:
                    stage.take(PIECE)
                flags = self._segment(FLAGS + 2 * AREA)
                self.flags = memoryview(flags.map).cast("q")
                # A process of the same number in another container is somebody else.
                self.flags[_TOKEN] = token = secrets.randbits(62)
                endpoint = os.getpid(), flags.serial, token, network()
            except OSError as error:
                endpoint = f"rank {dist.get_rank()} got no shared memory: {error.strerror}"
        endpoints = gather_objects(endpoint, group)
        problem = next((endpoint for endpoint in endpoints if isinstance(endpoint, str)), None)
        if problem is None:
            try:
                self.peers += [Peer(rank, pid) for rank, (pid, *_) in zip(ranks, endpoints, strict=True)]
                maps = [peer.map(serial) for peer, (_, serial, *_) in zip(self.peers, endpoints, strict=True)]
                self.peer_flags = [memoryview(segment).cast("q") for segment in maps]
                self.quick = Quick(self, maps)
                foreign = [
                    rank
                    for rank, flags, (*_, token, where) in zip(ranks, self.peer_flags, endpoints, strict=True)
                    if flags[_TOKEN] != token or where != network()
                ]
                problem = f"rank {foreign[0]} is not on this host" if foreign else None
            except OSError as error:
                problem = f"rank {dist.get_rank()} cannot open every other rank's memory ({error.strerror or error})"
        problem = next((text for text in gather_objects(problem, group) if text is not None), None)
        if problem is not None:
            self.close()
            raise OSError(problem)

    # -- memory

    def _segment(self, nbytes: int) -> SharedSegment:
        segment = SharedSegment(nbytes)
        self._segments[segment.serial] = segment
        return segment

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor that peers can read where it is, zeroed. It lives as long as the transport.

        Raises `OSError` where the memory cannot be had.
        """
        segment = self._segment(max(1, elements * dtype.itemsize))
        self._open.append(segment)
        return segment.tensor(elements, dtype) if elements else torch.empty(0, dtype=dtype)

    def allocate(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        shared = None
        with suppress(OSError):
            shared = self.empty(elements, dtype)
        failed = torch.tensor([float(shared is None)])
        self.quick.all_reduce(failed, maximum=True)  # all ranks have the segment, or none uses it
        return torch.zeros(elements, dtype=dtype) if shared is None or failed.item() else shared

    def wait_readers(self, memory: Tensor) -> None:
        if (flights := self._lent.pop(memory.data_ptr(), None)) is not None:
            flights.wait_idle()

    def place(self, tensor: Tensor) -> int | None:
        """The word that tells peers where the tensor's memory begins; None where they cannot see it."""
        address = tensor.data_ptr()
        for segment in self._open:
            if segment.address <= address < segment.address + segment.nbytes:
                return word_of(segment.serial, address - segment.address)
        return None

    def stage(self, nbytes: int) -> StagingBuffer:
        """The stage whose turn it is: with two of them a collective need not wait for the readers of the last one."""
        stage = self._stages[self._sequence_of_stages % 2]
        self._sequence_of_stages += 1
        stage.take(nbytes)
        return stage

    def aside(self, elements: int, dtype: Any) -> Array:
        if self._aside.nbytes < elements * dtype.itemsize:
            self._aside = np.empty(elements * dtype.itemsize, np.uint8)
        return self._aside.view(np.uint8)[: elements * dtype.itemsize].view(dtype)

    def there(self, peer: int, word: int, dtype: Any) -> tuple[Array, int]:
        """(the peer's whole segment, the element of it where its memory begins)."""
        serial, offset = location(word)
        key = peer, serial, dtype
        array = self._arrays.get(key)
        if array is None:
            array = np.frombuffer(self.peers[peer].map(serial), np.uint8)
            array = self._arrays[key] = array[: array.size // dtype.itemsize * dtype.itemsize].view(dtype)
        return array, offset // dtype.itemsize

    # -- collectives

    def how(self, op: str, full: Tensor) -> Realization:
        return Realization("shared", op not in _EAGER)

    def shortcut(self, op: str, nbytes: int) -> bool:
        return 0 < nbytes <= _SHORTCUTS.get(op, -1)

    def run(self, schedule: CommSchedule, memory: Tensor) -> None:
        """Do this rank's part of a schedule on its whole memory: flat, `schedule.bounds(elements)[-1]` elements."""
        if memory.numel():
            elements = memory.numel() // len(schedule.regions)
            self.start(schedule, memory, Window(memory.numel(), 0, 0), elements).wait()

    def run_schedule(
        self, carried: Carried, flat: Tensor, start: int, width: int, workspace: Workspace, maximum: bool
    ) -> Moved:
        pieces, elements = carried.pieces, width * carried.pieces
        window = Window(width, flat.numel() // pieces if pieces > 1 else 0, start)
        self.start(carried.schedule, flat, window, elements, "max" if maximum else "sum").wait()
        plan = _plan(carried.schedule, elements, self.rank)
        return Moved(plan.sent * flat.element_size(), plan.rounds)

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False, at_once: bool = False) -> Work:
        """On every rank the result has the same bits."""
        if at_once:
            self.quick.all_reduce(tensor, maximum=maximum)
            return DONE
        return self._begin(tensor, lambda: self._all_reduce(tensor.view(-1), "max" if maximum else "sum"))

    def _all_reduce(self, flat: Tensor, combine: str) -> Flights:
        n, size = flat.numel(), flat.element_size()
        schedule = _all_reduce(self.ranks, (self.ranks - 1) * n * size >= TWO_SHOT_FROM)
        # Regions of a schedule that has several all stand for the tensor.
        windows = [Window(width, 0, start) for start, width in self._pieces(flat, n, PIECE // size)]
        return Flights([self.start(schedule, flat, window, window.width, combine) for window in windows])

    def all_gather(self, out: Tensor, piece: Tensor, *, at_once: bool = False) -> Work:
        if at_once:
            self.quick.all_gather(out, piece)
            return DONE
        return self._begin(out, lambda: self._all_gather(out.view(-1), piece))

    def _all_gather(self, flat: Tensor, piece: Tensor) -> Flights:
        """Peers may go on reading memory of `allocate`: only gathers write there, and the next one waits."""
        n = piece.numel()
        own = flat[self.rank * n : (self.rank + 1) * n]
        if own.data_ptr() != piece.data_ptr():
            self.wait_readers(flat)
            own.copy_(piece.reshape(-1))
        schedule = _direct("all-gather", self.ranks)
        windows = [Window(width, n, start) for start, width in self._pieces(flat, n, PIECE // flat.element_size())]
        flights = Flights([self.start(schedule, flat, window, self.ranks * window.width) for window in windows])
        self.lend(flat, flights)
        return flights

    def reduce_scatter(self, full: Tensor, into: Callable[[], Target]) -> Work:
        return self._begin(full, lambda: Reduction(self, full, into))

    def _begin(self, memory: Tensor, start: Callable[[], Work]) -> Work:
        """Start a collective now, if peers see its memory, or inside `wait`, which then copies it into sight."""
        return start() if self.sees(memory) else _Lazy(start)

    def lend(self, memory: Tensor, flights: Flights) -> None:
        """Let peers go on reading the flights' memory until `wait_readers`, if they see it."""
        if self.sees(memory):
            for flight in flights.flights:
                flight.lends = True
            self._lent[memory.data_ptr()] = flights

    def sum_pieces(self, full: Tensor, adding: Callable[[Window], AddsUp]) -> list[SharedCollective]:
        """Announce a sum of flat `full` over the ranks, of which each gets its piece.

        adding: what puts the sum of a part of that piece, a row of the window, into its place.
        """
        n = full.numel() // self.ranks
        schedule = _direct("reduce-scatter", self.ranks)
        windows = [
            Window(width, n, start)
            for start, width in self._pieces(full, n, PIECE // full.element_size() // self.ranks)
        ]
        return [self.start(schedule, full, w, self.ranks * w.width, adds_up=adding(w)) for w in windows]

    def _pieces(self, tensor: Tensor, elements: int, most: int) -> list[tuple[int, int]]:
        """(start, length) of the parts in which a collective is done: one where peers see the tensor itself."""
        if elements <= most or self.sees(tensor):
            return [(0, elements)] if elements else []
        return [(start, min(most, elements - start)) for start in range(0, elements, most)]

    def start(
        self,
        schedule: CommSchedule,
        memory: Tensor,
        window: Window,
        elements: int,
        combine: str = "sum",
        adds_up: AddsUp | None = None,
    ) -> SharedCollective:
        """Announce a collective over `elements` elements; every rank must start the same ones in the same order. Those
        that began long before are ended here, however few are still under way.

        window: where the schedule's memory lies in the flat tensor `memory`. combine, adds_up: as `SharedCollective`
        has them.
        """
        self._sequence += 1
        # A peer may be half of all slots behind: whose flags lie where those of the next ones will is ended on both.
        while self.started and self._sequence - self.started[0].sequence >= SLOTS // 2:
            self.started[0].wait()
        plan = _plan(schedule, elements, self.rank)
        flight = SharedCollective(self, plan, memory, window, combine, adds_up, self._sequence)
        self.started.append(flight)
        return flight

    def sees(self, tensor: Tensor) -> bool:
        return self.place(tensor) is not None

    # -- messages

    def all_to_all(
        self, out: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int], *, at_once: bool = False
    ) -> Work:
        if at_once:
            self.quick.all_to_all(out, tensor)
            return DONE
        return self._mail(EXCHANGES).all_to_all(out.split(list(received)), tensor.split(list(sent)))

    def send(self, tensor: Tensor, peer: int) -> Work:
        return self._mail(MESSAGES).send(tensor, peer)

    def receive(self, out: Tensor, peer: int) -> Work:
        return self._mail(MESSAGES).receive(out, peer)

    def _mail(self, kind: int) -> Mail:
        if kind not in self._mails:
            self._mails[kind] = Mail(self, kind)
        return self._mails[kind]

    def rest(self, resting: bool) -> None:
        self.spin.rests = resting

    def watch(self, look: Callable[[], object]) -> None:
        self.spin.look = look

    def close(self) -> None:
        self._let_go()
        for mail in self._mails.values():
            mail.close()


class _Lazy:
    """A collective that starts inside `wait`: memory that is copied into sight need not be announced before."""

    def __init__(self, start: Callable[[], Work]) -> None:
        self._start = start

    def wait(self) -> None:
        self._start().wait()

    def is_completed(self) -> bool:
        return False


def _let_go(segments: dict[int, SharedSegment], peers: list[Peer]) -> None:
    """End the sharing; peers keep what they have mapped."""
    for segment in segments.values():
        segment.close()
    for peer in peers:
        peer.forget()


@cache
def _direct(collective: str, ranks: int) -> CommSchedule:
    return build(collective, "one-shot", ranks)


@cache
def _all_reduce(ranks: int, large: bool) -> CommSchedule:
    return build("all-reduce", "two-shot" if large else "one-shot", ranks)


@lru_cache(maxsize=1024)
def _plan(schedule: CommSchedule, elements: int, rank: int) -> RankPlan:
    """Schedules compare by identity: whoever wants their plans kept keeps them."""
    return rank_plan(schedule, elements, rank)
