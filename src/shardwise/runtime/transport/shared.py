"""Collectives between processes of one host, by reading each other's memory: `SharedTransport`.

It runs the same `CommSchedule` that is verified and priced, as its `rank_plan`. A tensor that lives in a segment
(`SharedTransport.empty`) is read by the peers where it is; of any other, what they must see is copied into a segment
first. Nothing runs in the background: a collective that is started is announced, and the rank's part of it is done by
who waits for it. On a host whose cores all compute there is nobody else who could.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from shardwise.runtime.transport.adding import Target, add_up, wide_room
from shardwise.runtime.transport.memory import ALIGNED, Peer, SharedSegment, SpinWait, can_share
from shardwise.runtime.transport.plan import Places, RankPlan, Transfer, rank_plan
from shardwise.schedule import CommSchedule, build
from shardwise.schedule.traffic import WINDOW, Moved

Array = NDArray[Any]
AddsUp = Callable[[dict[int, Tensor]], None]
"""Adds up what a rank reads of others, by peer, and what it has itself."""

SLOTS = 64
"""Collectives whose flags are kept apart: the one that is oldest under way, and all since, on a rank that is ahead."""
_WORDS = ALIGNED // 8
_QUICK = SLOTS * _WORDS
_AREAS = (SLOTS + 1) * ALIGNED
_BASE, _READY, _READ = 0, 1, 2
_TOKEN = _WORDS - 1
MESSAGES, EXCHANGES = 3, 4
"""Words of the first line that say where a rank's mail is (`Mail`), one for each kind."""
_BIAS = 1 << 43
_ROUNDS = 1 << 20
"""More than any schedule has; flags count rounds over all collectives."""

TWO_SHOT_FROM = 32 << 10
"""Bytes from which an all-reduce of two ranks reads each part once and not twice: `shardwise collective bench`."""
AREA = 64 << 10
"""Bytes of either place through which what is small goes (`Quick`)."""
VIEWS = 1024
"""Sizes of which `Quick` keeps where they lie; prompts have ever new ones."""
PIECE = WINDOW
"""Bytes that go through the segment at a time, where a tensor does not live in one."""

_NOTHING = np.empty(0)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int16}


class SharedTransport:
    """One rank's end of a group of processes on one host.

    group: their process group, over which they meet here; every member must make the transport. timeout: seconds that a
    rank waits for another. Raises `OSError` on every rank alike when they cannot share memory.
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
        self.patience = SpinWait(self.ranks, len(os.sched_getaffinity(0)), timeout)
        # What nobody closed goes with the transport: a process may make many.
        self.close = weakref.finalize(self, _let_go, self._segments, self.peers)
        self._meet(group)

    def _meet(self, group: dist.ProcessGroup) -> None:
        """Tell the others where this rank's flags are, and map theirs; all succeed or all fail."""
        ranks = dist.get_process_group_ranks(group)
        card: Any = can_share()
        if card is None:
            try:
                for stage in self._stages:
                    stage.take(PIECE)
                flags = self._segment(_AREAS + 2 * AREA)
                self.flags = memoryview(flags.map).cast("q")
                # A process of the same number in another container is somebody else.
                self.flags[_TOKEN] = token = secrets.randbits(62)
                card = os.getpid(), flags.serial, token
            except OSError as error:
                card = f"rank {dist.get_rank()} got no shared memory: {error.strerror}"
        cards = self._all(group, card)
        problem = next((card for card in cards if isinstance(card, str)), None)
        if problem is None:
            try:
                self.peers += [Peer(rank, pid) for rank, (pid, _, _) in zip(ranks, cards, strict=True)]
                maps = [peer.map(serial) for peer, (_, serial, _) in zip(self.peers, cards, strict=True)]
                self.theirs = [memoryview(found).cast("q") for found in maps]
                self.quick = Quick(self, maps)
                strangers = [
                    rank
                    for rank, flags, card in zip(ranks, self.theirs, cards, strict=True)
                    if flags[_TOKEN] != card[2]
                ]
                problem = f"rank {strangers[0]} is not on this host" if strangers else None
            except OSError as error:
                problem = f"rank {dist.get_rank()} cannot open every other rank's memory ({error.strerror or error})"
        problem = next((found for found in self._all(group, problem) if found is not None), None)
        if problem is not None:
            self.close()
            raise OSError(problem)

    def _all(self, group: dist.ProcessGroup, mine: Any) -> list[Any]:
        # The group itself is not kept: gloo's threads must be gone when the process ends.
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, mine, group=group)
        return every

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

    def place(self, tensor: Tensor) -> int | None:
        """The word that tells peers where the tensor's memory begins; None where they cannot see it."""
        address = tensor.data_ptr()
        for segment in self._open:
            if segment.address <= address < segment.address + segment.nbytes:
                return _word(segment.serial, address - segment.address)
        return None

    def stage(self, nbytes: int) -> StagingBuffer:
        """The stage whose turn it is: with two of them a collective need not wait for the readers of the last one."""
        stage = self._stages[self._sequence_of_stages % 2]
        self._sequence_of_stages += 1
        stage.take(nbytes)
        return stage

    def aside(self, elements: int, dtype: Any) -> Array:
        """A buffer of this rank's own."""
        if self._aside.nbytes < elements * dtype.itemsize:
            self._aside = np.empty(elements * dtype.itemsize, np.uint8)
        return self._aside.view(np.uint8)[: elements * dtype.itemsize].view(dtype)

    def there(self, peer: int, word: int, dtype: Any) -> tuple[Array, int]:
        """(the peer's whole segment, the element of it where its memory begins)."""
        serial, offset = word >> 44, (word & ((1 << 44) - 1)) - _BIAS
        key = peer, serial, dtype
        found = self._arrays.get(key)
        if found is None:
            found = np.frombuffer(self.peers[peer].map(serial), np.uint8)
            found = self._arrays[key] = found[: found.size // dtype.itemsize * dtype.itemsize].view(dtype)
        return found, offset // dtype.itemsize

    # -- collectives

    def run(self, schedule: CommSchedule, memory: Tensor) -> None:
        """Do this rank's part of a schedule on its whole memory: flat, `schedule.bounds(elements)[-1]` elements."""
        if memory.numel():
            elements = memory.numel() // len(schedule.regions)
            self.start(schedule, memory, Window(memory.numel(), 0, 0), elements).wait()

    def run_window(
        self, schedule: CommSchedule, memory: Tensor, start: int, width: int, pieces: int, maximum: bool
    ) -> Moved:
        """Do this rank's part of a schedule of one region on elements [start, start + width) of each of `pieces` equal
        pieces of a flat tensor. Returns what peers read of this rank, in bytes, and its rounds."""
        window = Window(width, memory.numel() // pieces if pieces > 1 else 0, start)
        combine = "max" if maximum else "sum"
        flight = self.start(schedule, memory, window, width * pieces, combine)
        flight.wait()
        plan = _plan(schedule, width * pieces, self.rank)
        return Moved(plan.sent * memory.element_size(), plan.rounds)

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> Flights:
        """Announce a sum, or maximum, over the ranks, in place; on every rank the same bits. tensor: contiguous."""
        flat = tensor.view(-1)
        n, size = flat.numel(), flat.element_size()
        schedule = _all_reduce(self.ranks, (self.ranks - 1) * n * size >= TWO_SHOT_FROM)
        combine = "max" if maximum else "sum"
        # Regions of a schedule that has several all stand for the tensor.
        windows = [Window(width, 0, start) for start, width in self._pieces(flat, n, PIECE // size)]
        return Flights([self.start(schedule, flat, window, window.width, combine) for window in windows])

    def all_gather(self, out: Tensor, piece: Tensor, *, lent: bool = False) -> Flights:
        """Announce every rank's flat `piece`, in the dtype of `out`, end to end in it. It may be its place there.

        lent: nobody but gathers into that memory writes there. Then a rank need not wait until others have read what it
        gives: the next gather into the memory does.
        """
        flat, n = out.view(-1), piece.numel()
        own = flat[self.rank * n : (self.rank + 1) * n]
        if own.data_ptr() != piece.data_ptr():
            self.release(flat)
            own.copy_(piece.reshape(-1))
        schedule = _direct("all-gather", self.ranks)
        windows = [Window(width, n, start) for start, width in self._pieces(flat, n, PIECE // flat.element_size())]
        flights = Flights([self.start(schedule, flat, window, self.ranks * window.width) for window in windows])
        if lent:
            self.borrow(flat, flights)
        return flights

    def borrow(self, memory: Tensor, flights: Flights) -> None:
        """Let peers go on reading the flights' memory until `release`."""
        if self.sees(memory):
            for flight in flights.flights:
                flight.lends = True
            self._lent[memory.data_ptr()] = flights

    def reduction(self, full: Tensor, into: Callable[[], Target], *, lent: bool = False) -> Reduction:
        """A reduce-scatter of flat `full`, to be started, whose piece for this rank goes where `into` says.

        lent: `full` is not written again before `release`, so that a rank need not wait until others have read it.
        """
        return Reduction(self, full, into, lent)

    def release(self, memory: Tensor) -> None:
        """Wait until the peers have read what lies in memory that was lent to a reduction."""
        if (flights := self._lent.pop(memory.data_ptr(), None)) is not None:
            flights.settle()

    def reduce_scatter(self, full: Tensor, adding: Callable[[Window], AddsUp]) -> Flights:
        """Announce a sum of flat `full` over the ranks, of which each gets its piece.

        adding: what puts the sum of a part of that piece, a row of the window, into its place.
        """
        n = full.numel() // self.ranks
        schedule = _direct("reduce-scatter", self.ranks)
        windows = [
            Window(width, n, start)
            for start, width in self._pieces(full, n, PIECE // full.element_size() // self.ranks)
        ]
        return Flights([self.start(schedule, full, w, self.ranks * w.width, adds_up=adding(w)) for w in windows])

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
        """Whether peers can read the tensor where it is."""
        return self.place(tensor) is not None


class Quick:
    """Sums and gathers of a few kilobytes at once, with next to no work around them: one-shot, as schedules have it.

    Each rank puts what it has into one of two places by turns, says so, and reads everybody's. It may fill a place
    again without asking who has read it: all ranks take part in every one, and it has seen each of them come to the
    last one, hence be through with the one before. All ranks must do them in the same order; that of flights beside
    them does not matter.

    transport: whose flags and peers these are. maps: every rank's segment of flags, behind which the places lie.
    """

    def __init__(self, transport: SharedTransport, maps: list[mmap.mmap]) -> None:
        self.rank, self.ranks = transport.rank, transport.ranks
        self._others = [peer for peer in range(self.ranks) if peer != self.rank]
        # Nothing here refers back to the transport, which goes with its last user.
        self._flags, self._theirs = transport.flags, transport.theirs
        self._peers, self._patience, self._maps = transport.peers, transport.patience, maps
        self._count = 0
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    def sums(self, tensor: Tensor) -> bool:
        """Whether a tensor is small enough to be summed here; ranks that have equal ones agree. It may be larger than
        what a flight does in one shot: starting a flight takes longer than reading some kilobytes twice."""
        return tensor.nbytes <= AREA

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """Sum, or maximum, over the ranks, in place; on every rank the same bits. tensor: contiguous."""
        combine: Callable[..., Tensor] = torch.maximum if maximum else torch.add
        with _unwatched():
            flat = tensor.view(-1)
            found = self._exchange(flat)
            combine(found[0], found[1], out=flat)
            for other in found[2:]:
                combine(flat, other, out=flat)

    def all_gather(self, out: Tensor, piece: Tensor) -> None:
        """Every rank's `piece` end to end in `out`, as many bytes at a time as a place has. Both contiguous."""
        with _unwatched():
            rows, flat = out.view(self.ranks, -1), piece.view(-1)
            step = AREA // flat.element_size()
            for start in range(0, flat.numel(), step):
                for row, found in zip(rows, self._exchange(flat[start : start + step]), strict=True):
                    row[start : start + step].copy_(found)

    def _exchange(self, flat: Tensor) -> list[Tensor]:
        """What every rank has, until the next but one."""
        place = self._count % 2
        self._count = count = self._count + 1
        key = place, flat.numel(), flat.dtype
        found = self._views.get(key)
        if found is None:
            if len(self._views) == VIEWS:
                self._views.clear()
            found = self._views[key] = self._view(*key)
        found[self.rank].copy_(flat)
        self._flags[_QUICK] = count
        for peer in self._others:
            flags = self._theirs[peer]
            if flags[_QUICK] < count:
                self._patience.wait(flags, _QUICK, count, self._peers[peer])
        return found

    def _view(self, place: int, elements: int, dtype: torch.dtype) -> list[Tensor]:
        start = _AREAS + place * AREA
        return [torch.frombuffer(found, dtype=dtype, count=elements, offset=start) for found in self._maps]


class Window(NamedTuple):
    """Where the elements of a schedule's memory lie in a tensor: rows of `width` of them, `pitch` apart, from `offset`.

    With a pitch of zero all rows are the same place.
    """

    width: int
    pitch: int
    offset: int

    def pieces(self, a: int, b: int) -> Iterator[tuple[int, int, int]]:
        """(first element of the schedule, first of the tensor, how many) of the parts of [a, b) that lie end to end."""
        while a < b:
            row, at = divmod(a, self.width)
            length = min(b - a, self.width - at)
            yield a, row * self.pitch + self.offset + at, length
            a += length


class Flights:
    """Collectives under way, to be waited for together."""

    def __init__(self, flights: list[SharedCollective]) -> None:
        self.flights = flights

    def wait(self) -> None:
        for flight in self.flights:
            flight.wait()

    def settle(self) -> None:
        """Wait until the peers have read what they read of this rank."""
        for flight in self.flights:
            flight.settle()


class Reduction:
    """A reduce-scatter: `wait` adds up the ranks' pieces for this one, straight into the place where the sum stays."""

    def __init__(self, transport: SharedTransport, full: Tensor, into: Callable[[], Target], lent: bool) -> None:
        self._transport, self._full, self._into, self._lent = transport, full, into, lent
        self._target: tuple[Target, Tensor | None] | None = None

    def start(self) -> Reduction:
        if not self._lent:
            self._aim()
        self._under_way = self._transport.reduce_scatter(self._full, self._adding)
        if self._lent:
            self._transport.borrow(self._full, self._under_way)
        return self

    def arrived(self) -> bool:
        """Whether all peers have come to it."""
        return all(flight.arrived() for flight in self._under_way.flights)

    def wait(self) -> None:
        self._aim()
        self._under_way.wait()

    def _aim(self) -> tuple[Target, Tensor | None]:
        """Where the sum goes, asked once, before any part of it is made, and room to make it."""
        if self._target is None:
            target = self._into()
            self._target = target, wide_room(target, self._transport.ranks)
        return self._target

    def _adding(self, window: Window) -> AddsUp:
        ranks, rank = self._transport.ranks, self._transport.rank
        part = slice(window.offset, window.offset + window.width)

        def adds_up(found: dict[int, Tensor]) -> None:
            target, wide = self._aim()
            n = self._full.numel() // ranks
            own = self._full[rank * n : (rank + 1) * n][part]
            # Added to what was there in the order of the ranks, as on gloo: the same bits. What is overwritten may be
            # this rank's own piece, which then comes first.
            order = sorted(range(ranks), key=lambda peer: peer if target.adds else peer != rank)
            add_up([found.get(peer, own) for peer in order], target._replace(tensor=target.tensor[part]), wide)

        return adds_up


class SharedCollective:
    """One rank's part of one collective in progress. `wait` does what is left of it; the memory is the caller's again.

    Of memory in a segment the start is announced at once. Any other is brought into sight when it is waited for.
    adds_up: takes what this rank reads of all others in its one round, by peer, instead of the memory itself, whoever
    ends the flight. lends: peers may go on reading the memory after `wait`, until `settle`.
    """

    def __init__(
        self,
        transport: SharedTransport,
        plan: RankPlan,
        memory: Tensor,
        window: Window,
        combine: str,
        adds_up: AddsUp | None,
        sequence: int,
    ) -> None:
        self._transport, self._plan, self.window = transport, plan, window
        self._adds_up = adds_up
        self.lends = False
        self._memory: Tensor | None = memory
        self._own, self._dtype = flat_array(memory), memory.dtype
        self._combine = _combiner(combine, memory.dtype)
        self.sequence = sequence
        self._at, self._tag = sequence % SLOTS * _WORDS, sequence * _ROUNDS
        self._done = False
        self._sight, self._shift = self._own, 0
        # A part of the tensor, or one with fewer regions than the schedule has, is not the schedule's memory as it is.
        word = transport.place(memory) if plan.elements == memory.numel() else None
        self._resident = word is not None
        if word is not None:
            self._announce(word)

    def wait(self) -> None:
        if self._done:
            return
        self._done = True
        self._transport.started.remove(self)
        stage = None if self._resident else self._enter()
        self._go()
        self._adds_up = None
        if stage is None:
            if not self.lends:
                self.settle()
        else:
            stage.flight = self
            for span in self._plan.footing.leave:
                for at, private, length in self.window.pieces(*span):
                    self._own[private : private + length] = self._seen(at, at + length)
            # What peers may still read is the stage, which waits for them.
            self._own, self._memory = _NOTHING, None

    def settle(self) -> None:
        """Wait until the peers have read what they read of this rank."""
        for fence in self._plan.after:
            self._await(fence.peer, _READ, fence.round)

    def arrived(self) -> bool:
        """Whether all whom this rank reads have come to where it reads them."""
        transport, at = self._transport, self._at + _READY
        return self._done or all(
            transport.theirs[move.peer][at] > self._tag + step.number
            for step in self._plan.steps
            for move in step.moves
            if move.peer != transport.rank
        )

    # -- its flags

    def _announce(self, word: int) -> None:
        flags = self._transport.flags
        flags[self._at + _BASE] = word
        if self._plan.steps:
            flags[self._at + _READY] = self._tag + self._plan.steps[0].number + 1

    def _await(self, peer: int, what: int, round: int) -> None:
        flags, at, value = self._transport.theirs[peer], self._at + what, self._tag + round + 1
        if flags[at] < value:
            self._transport.patience.wait(flags, at, value, self._transport.peers[peer])

    # -- its memory

    def _enter(self) -> StagingBuffer:
        """Bring into sight what peers must see."""
        footing, size = self._plan.footing, self._own.itemsize
        first, last = footing.span
        stage = self._transport.stage((last - first) * size)
        self._sight, self._shift = stage.array(self._own.dtype), first
        for span in footing.enter:
            for at, private, length in self.window.pieces(*span):
                self._seen(at, at + length)[...] = self._own[private : private + length]
        self._announce(_word(stage.serial, -first * size))
        return stage

    def _seen(self, a: int, b: int) -> Array:
        return self._sight[a - self._shift : b - self._shift]

    def _private(self, a: int, b: int) -> Array:
        ((_, start, length),) = self.window.pieces(a, b)
        return self._own[start : start + length]

    def _place(self, span: tuple[int, int], seen: bool) -> Array:
        return self._seen(*span) if seen else self._private(*span)

    # -- its rounds

    def _go(self) -> None:
        plan, flags = self._plan, self._transport.flags
        ready, read = self._at + _READY, self._at + _READ
        places = (plan.in_sight if self._resident else plan.footing).places
        for step, where in zip(plan.steps, places, strict=True):
            flags[ready] = self._tag + step.number + 1
            for fence in step.before:
                self._await(fence.peer, _READ, fence.round)
            if self._adds_up is None:
                for move, place in zip(step.moves, where, strict=True):
                    self._take(move, place, step.number)
            elif step.moves:
                with _unwatched():
                    sources = {move.peer: self._there(move, step.number) for move in step.moves}
                    self._adds_up({p: torch.from_numpy(each).view(self._dtype) for p, each in sources.items()})
            flags[read] = self._tag + step.number + 1
            for fence in step.between:
                self._await(fence.peer, _READ, fence.round)
            for move, place in zip(step.moves, where, strict=True):
                if move.aside is not None:
                    self._apply(self._transport.aside(plan.aside, self._own.dtype)[slice(*move.aside)], move, place)

    def _take(self, move: Transfer, place: Places, round: int) -> None:
        if move.peer == self._plan.rank:
            source = self._place(move.source, place.source)
        else:
            source = self._there(move, round)
        if move.aside is not None:
            self._transport.aside(self._plan.aside, self._own.dtype)[slice(*move.aside)] = source
        else:
            self._apply(source, move, place)

    def _there(self, move: Transfer, round: int) -> Array:
        """What a move reads of a peer, when that has come to the round."""
        self._await(move.peer, _READY, round)
        word = self._transport.theirs[move.peer][self._at + _BASE]
        array, base = self._transport.there(move.peer, word, self._own.dtype)
        return array[base + move.source[0] : base + move.source[1]]

    def _apply(self, source: Array, move: Transfer, place: Places) -> None:
        new = self._place(move.target, place.new)
        if move.reduce:
            self._combine(self._place(move.target, place.old), source, new)
        else:
            new[...] = source


class StagingBuffer:
    """Segment for copies of data that peers must read, grown as needed; one collective uses it at a time.

    flight: the last one that had it, whose readers may not all be through.
    """

    def __init__(self, make: Callable[[int], SharedSegment]) -> None:
        self._make = make
        self._segment: SharedSegment | None = None
        self.flight: SharedCollective | None = None

    def take(self, nbytes: int) -> None:
        """Have at least so many bytes, when the last collective's readers are through."""
        if self.flight is not None:
            self.flight.settle()
            self.flight = None
        if self._segment is None or self._segment.nbytes < nbytes:
            self._segment = self._make(max(PIECE, 1 << (nbytes - 1).bit_length()))

    @property
    def serial(self) -> int:
        assert self._segment is not None
        return self._segment.serial

    def array(self, dtype: Any) -> Array:
        assert self._segment is not None
        return self._segment.bytes.view(dtype)


def _let_go(segments: dict[int, SharedSegment], peers: list[Peer]) -> None:
    """End the sharing; peers keep what they have mapped."""
    for segment in segments.values():
        segment.close()
    for peer in peers:
        peer.forget()


def _unwatched() -> AbstractContextManager[None]:
    """Whoever counts this rank's memory must not count what peers share with it."""
    return torch._C._DisableTorchDispatch()  # type: ignore[no-any-return]


def _word(serial: int, offset: int) -> int:
    """Where a rank's memory begins, for its peers: the segment, and a byte of it, which may lie before its start."""
    return serial << 44 | (offset + _BIAS)


def flat_array(memory: Tensor) -> Array:
    """The memory of a tensor, which must outlive it. numpy knows no bfloat16, whose bits are as good for copies.

    `Tensor.numpy` would forbid for good that the storage is resized, as the engine's buffers are.
    """
    assert memory.is_contiguous() and memory.device.type == "cpu"
    dtype = memory.dtype if memory.dtype in _NUMPY else _BITS[memory.element_size()]
    place = (ctypes.c_char * (memory.numel() * memory.element_size())).from_address(memory.data_ptr())
    return np.frombuffer(memoryview(place), str(dtype).removeprefix("torch."))


def _combiner(kind: str, dtype: torch.dtype) -> Callable[[Array, Array, Array], object]:
    """(old, arriving, where the new goes) -> ."""
    if dtype in _NUMPY:
        return np.maximum if kind == "max" else np.add
    combine: Callable[..., object] = torch.maximum if kind == "max" else torch.add

    def by_torch(old: Array, source: Array, new: Array) -> None:
        with _unwatched():
            a, b, out = (torch.from_numpy(array).view(dtype) for array in (old, source, new))
            combine(a, b, out=out)

    return by_torch


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
