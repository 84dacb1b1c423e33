"""One rank's part of a collective on memory that ranks read in place or through segments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.runtime.transport.buffers import Target, add_up, wide_room
from shardwise.runtime.transport.memory import ALIGNED, SharedSegment
from shardwise.runtime.transport.plan import Places, RankPlan, Transfer
from shardwise.runtime.transport.protocol import Works
from shardwise.schedule.traffic import WINDOW

if TYPE_CHECKING:
    from shardwise.runtime.transport.shared import SharedTransport

Array = NDArray[Any]
AddsUp = Callable[[dict[int, Tensor]], None]
"""Adds up what a rank reads of others, by peer, and what it has itself."""

SLOTS = 64
"""Collectives whose flags are kept apart: the one that is oldest under way, and all since, on a rank that is ahead."""
WORDS = ALIGNED // 8
PIECE = WINDOW
"""Bytes that go through the segment at a time, where a tensor does not live in one."""
_BASE, _READY, _READ = 0, 1, 2
_BIAS = 1 << 43
_ROUNDS = 1 << 20
"""More than any schedule has; flags count rounds over all collectives."""
_NOTHING = np.empty(0)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int16}


class Window(NamedTuple):
    """Place of a schedule's memory in a tensor: rows of `width` of them, `pitch` apart, from `offset`.

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


class Flights(Works):
    """Collectives under way, to be waited for together."""

    def __init__(self, flights: list[SharedCollective]) -> None:
        super().__init__(flights)
        self.flights = flights

    def wait_idle(self) -> None:
        """Wait until the peers have read what they read of this rank."""
        for flight in self.flights:
            flight.wait_idle()


class Reduction(Flights):
    """A reduce-scatter: `wait` adds up the ranks' pieces for this one, straight into the place where the sum stays."""

    def __init__(self, transport: SharedTransport, full: Tensor, into: Callable[[], Target]) -> None:
        self._transport, self._full, self._into = transport, full, into
        self._target: tuple[Target, Tensor | None] | None = None
        super().__init__(transport.sum_pieces(full, self._adding))
        transport.lend(full, self)

    def wait(self) -> None:
        self._aim()
        super().wait()

    def _aim(self) -> tuple[Target, Tensor | None]:
        """Destination of the sum, asked for once, before any part of it is made, and room to make it."""
        if self._target is None:
            target = self._into()
            self._target = target, wide_room(target, self._transport.ranks)
        return self._target

    def _adding(self, window: Window) -> AddsUp:
        ranks, rank = self._transport.ranks, self._transport.rank
        part = slice(window.offset, window.offset + window.width)

        def adds_up(pieces: dict[int, Tensor]) -> None:
            target, wide = self._aim()
            n = self._full.numel() // ranks
            own = self._full[rank * n : (rank + 1) * n][part]
            # Added to what was there in the order of the ranks, as on gloo: the same bits. What is overwritten may be
            # this rank's own piece, which then comes first.
            order = sorted(range(ranks), key=lambda peer: peer if target.adds else peer != rank)
            add_up([pieces.get(peer, own) for peer in order], target._replace(tensor=target.tensor[part]), wide)

        return adds_up


class SharedCollective:
    """One rank's part of one collective in progress. `wait` does what is left of it; the memory is the caller's again.

    Of memory in a segment the start is announced at once. Any other is brought into sight when it is waited for.
    adds_up: takes what this rank reads of all others in its one round, by peer, instead of the memory itself, whoever
    ends the flight. lends: peers may go on reading the memory after `wait`, until `wait_idle`.
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
        self._at, self._tag = sequence % SLOTS * WORDS, sequence * _ROUNDS
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
                self.wait_idle()
        else:
            stage.flight = self
            for span in self._plan.copy_plan.leave:
                for at, private, length in self.window.pieces(*span):
                    self._own[private : private + length] = self._seen(at, at + length)
            # What peers may still read is the stage, which waits for them.
            self._own, self._memory = _NOTHING, None

    def wait_idle(self) -> None:
        for fence in self._plan.after:
            self._await(fence.peer, _READ, fence.round)

    def is_completed(self) -> bool:
        """Whether all whom this rank reads have come to where it reads them."""
        transport, at = self._transport, self._at + _READY
        return self._done or all(
            transport.peer_flags[transfer.peer][at] > self._tag + step.number
            for step in self._plan.steps
            for transfer in step.transfers
            if transfer.peer != transport.rank
        )

    # -- its flags

    def _announce(self, word: int) -> None:
        flags = self._transport.flags
        flags[self._at + _BASE] = word
        if self._plan.steps:
            flags[self._at + _READY] = self._tag + self._plan.steps[0].number + 1

    def _await(self, peer: int, what: int, round: int) -> None:
        flags, at, value = self._transport.peer_flags[peer], self._at + what, self._tag + round + 1
        if flags[at] < value:
            self._transport.spin.wait(flags, at, value, self._transport.peers[peer])

    # -- its memory

    def _enter(self) -> StagingBuffer:
        copies, size = self._plan.copy_plan, self._own.itemsize
        first, last = copies.span
        stage = self._transport.stage((last - first) * size)
        self._sight, self._shift = stage.array(self._own.dtype), first
        for span in copies.enter:
            for at, private, length in self.window.pieces(*span):
                self._seen(at, at + length)[...] = self._own[private : private + length]
        self._announce(word_of(stage.serial, -first * size))
        return stage

    def _seen(self, a: int, b: int) -> Array:
        return self._sight[a - self._shift : b - self._shift]

    def _place(self, span: tuple[int, int], seen: bool) -> Array:
        if seen:
            return self._seen(*span)
        ((_, start, length),) = self.window.pieces(*span)
        return self._own[start : start + length]

    # -- its rounds

    def _go(self) -> None:
        plan, flags = self._plan, self._transport.flags
        ready, read = self._at + _READY, self._at + _READ
        places = (plan.in_sight if self._resident else plan.copy_plan).places
        for step, where in zip(plan.steps, places, strict=True):
            flags[ready] = self._tag + step.number + 1
            for fence in step.before:
                self._await(fence.peer, _READ, fence.round)
            if self._adds_up is None:
                for transfer, place in zip(step.transfers, where, strict=True):
                    self._take(transfer, place, step.number)
            elif step.transfers:
                with unwatched():
                    sources = {transfer.peer: self._there(transfer, step.number) for transfer in step.transfers}
                    self._adds_up({p: torch.from_numpy(each).view(self._dtype) for p, each in sources.items()})
            flags[read] = self._tag + step.number + 1
            for fence in step.between:
                self._await(fence.peer, _READ, fence.round)
            for transfer, place in zip(step.transfers, where, strict=True):
                if transfer.aside is not None:
                    self._apply(
                        self._transport.aside(plan.aside, self._own.dtype)[slice(*transfer.aside)], transfer, place
                    )

    def _take(self, transfer: Transfer, place: Places, round: int) -> None:
        if transfer.peer == self._plan.rank:
            source = self._place(transfer.source, place.source)
        else:
            source = self._there(transfer, round)
        if transfer.aside is not None:
            self._transport.aside(self._plan.aside, self._own.dtype)[slice(*transfer.aside)] = source
        else:
            self._apply(source, transfer, place)

    def _there(self, transfer: Transfer, round: int) -> Array:
        """Memory of a peer that a transfer reads, when that has come to the round."""
        self._await(transfer.peer, _READY, round)
        word = self._transport.peer_flags[transfer.peer][self._at + _BASE]
        array, base = self._transport.there(transfer.peer, word, self._own.dtype)
        return array[base + transfer.source[0] : base + transfer.source[1]]

    def _apply(self, source: Array, transfer: Transfer, place: Places) -> None:
        new = self._place(transfer.target, place.new)
        if transfer.reduce:
            self._combine(self._place(transfer.target, place.old), source, new)
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
            self.flight.wait_idle()
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


def unwatched() -> AbstractContextManager[None]:
    """Context in which memory of peers is not counted as this rank's."""
    return torch._C._DisableTorchDispatch()  # type: ignore[no-any-return]


def word_of(serial: int, offset: int) -> int:
    """Start of a rank's memory, for its peers: the segment, and a byte of it, which may lie before its start."""
    return serial << 44 | (offset + _BIAS)


def location(word: int) -> tuple[int, int]:
    return word >> 44, (word & ((1 << 44) - 1)) - _BIAS


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
        with unwatched():
            a, b, out = (torch.from_numpy(array).view(dtype) for array in (old, source, new))
            combine(a, b, out=out)

    return by_torch
