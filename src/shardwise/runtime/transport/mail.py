"""Messages between processes of one host, through memory that they share: `Mail`.

A message lies in a segment of its sender's: one whose last message has been taken, or else a new one. So a send never
waits, whatever the receiver does, and the tensor is the sender's again at once. Between two ranks messages are taken by
the order in which they were sent, though a receive that was posted later may be waited for first.

An all-to-all is a message from each rank to each other one, in mail of its own: its order does not depend on other
messages.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shardwise.runtime.transport.memory import ALIGNED, SharedSegment
from shardwise.runtime.transport.protocol import DONE, Works
from shardwise.runtime.transport.shared_collective import SLOTS, WORDS, flat_array, unwatched

if TYPE_CHECKING:
    from shardwise.runtime.transport.shared import SharedTransport


OUTSTANDING = 4096
"""Messages to one rank that may lie there untaken; more than that, and a send waits."""

PAGE = 4096
"""Bytes of which segments have a multiple."""

_WORDS = ALIGNED // 8
_RING, _TAKEN = _WORDS, _WORDS + OUTSTANDING
_EACH = _WORDS + 2 * OUTSTANDING
"""Words for each peer: how many messages were sent to it, where each lies, and which of its messages were taken."""


class Mail:
    """One rank's end of the messages among the ranks of `transport`, whose peers and patience it uses.

    A rank makes it for its first message, whenever that is, and `announced`, a word of the transport's flags, tells the
    peers where it is. Raises `RuntimeError` where memory runs out: the ranks have agreed by then that they share it.
    """

    def __init__(self, transport: SharedTransport, announced: int) -> None:
        self.rank, self.peers, self.spin = transport.rank, transport.peers, transport.spin
        self._segments = [_segment(transport.ranks * _EACH * 8)]
        self._own = memoryview(self._segments[0].map).cast("q")
        self._announced, self._flags = announced, transport.peer_flags
        self._peer_flags: list[memoryview | None] = [None] * transport.ranks
        transport.flags[announced] = self._segments[0].serial
        self._sent, self._posted = [0] * transport.ranks, [0] * transport.ranks
        self._under_way: list[dict[int, SharedSegment]] = [{} for _ in self.peers]
        self._free: list[list[SharedSegment]] = [[] for _ in self.peers]
        self.close = weakref.finalize(self, _close, self._segments)

    def send(self, tensor: Tensor, peer: int) -> Works:
        """Leave a contiguous tensor for `peer`. Raises `RuntimeError` when it has ended or takes nothing for too
        long, or where memory runs out."""
        number, array = self._sent[peer], flat_array(tensor)
        self._sent[peer] += 1
        if number >= OUTSTANDING:
            at = self.rank * _EACH + _TAKEN + number % OUTSTANDING
            self.spin.wait(self._words(peer), at, number - OUTSTANDING + 1, self.peers[peer])
        segment = self._place(peer, array.nbytes)
        segment.bytes[: array.nbytes].view(array.dtype)[:] = array
        self._under_way[peer][number] = segment
        mine = peer * _EACH
        self._own[mine + _RING + number % OUTSTANDING] = segment.serial
        self._own[mine] = number + 1
        return DONE

    def all_to_all(self, out: Sequence[Tensor], parts: Sequence[Tensor]) -> Works:
        """Send each rank its part of contiguous `parts`; `out` has room for theirs. Empty parts are not sent."""
        out[self.rank].copy_(parts[self.rank])
        for peer, part in enumerate(parts):
            if peer != self.rank and part.numel():
                self.send(part, peer)
        return Works([self.receive(x, peer) for peer, x in enumerate(out) if peer != self.rank and x.numel()])

    def _words(self, peer: int) -> memoryview:
        words = self._peer_flags[peer]
        if words is None:
            self.spin.wait(self._flags[peer], self._announced, 1, self.peers[peer])
            words = memoryview(self.peers[peer].map(self._flags[peer][self._announced])).cast("q")
            self._peer_flags[peer] = words
        return words

    def _place(self, peer: int, nbytes: int) -> SharedSegment:
        """A segment of `nbytes` or more with no message in it."""
        under_way, free = self._under_way[peer], self._free[peer]
        if self._flags[peer][self._announced]:  # a peer without mail has taken nothing
            taken = self._words(peer)
            for number in list(under_way):
                if taken[self.rank * _EACH + _TAKEN + number % OUTSTANDING] > number:
                    free.append(under_way.pop(number))
        if fits := [segment for segment in free if segment.nbytes >= nbytes]:
            # The smallest: a small message in the place of a large one would have that make another.
            smallest = min(fits, key=lambda segment: segment.nbytes)
            free.remove(smallest)
            return smallest
        self._segments.append(_segment(_room(nbytes)))
        return self._segments[-1]

    def receive(self, out: Tensor, peer: int) -> Arriving:
        """Post the receive of the next message of `peer` into a contiguous tensor of its size."""
        number = self._posted[peer]
        self._posted[peer] += 1
        return Arriving(self, out, peer, number)

    def came(self, peer: int, number: int) -> bool:
        return self._flags[peer][self._announced] > 0 and self._words(peer)[self.rank * _EACH] > number

    def take(self, out: Tensor, peer: int, number: int) -> None:
        """Wait for message `number` of `peer` and copy it."""
        theirs, at = self._words(peer), self.rank * _EACH
        if theirs[at] <= number:
            self.spin.wait(theirs, at, number + 1, self.peers[peer])
        array = flat_array(out)
        message = np.frombuffer(self.peers[peer].map(theirs[at + _RING + number % OUTSTANDING]), np.uint8)
        array[:] = message[: array.nbytes].view(array.dtype)
        self._own[peer * _EACH + _TAKEN + number % OUTSTANDING] = number + 1


class Arriving:
    """A message to come. `wait` has it in its tensor."""

    def __init__(self, mail: Mail, out: Tensor, peer: int, number: int) -> None:
        self._mail, self._out, self._peer, self._number = mail, out, peer, number

    def wait(self) -> None:
        self._mail.take(self._out, self._peer, self._number)

    def is_completed(self) -> bool:
        return self._mail.came(self._peer, self._number)


def _room(nbytes: int) -> int:
    """Bytes of a segment for a message of so many: at most a quarter more, beyond some pages.

    Messages come in any size, as prompts do, and their segments stay: with four sizes from one power of two to the next
    they do not add up.
    """
    step = max(PAGE, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(1, -(-nbytes // step)) * step


def _segment(nbytes: int) -> SharedSegment:
    try:
        return SharedSegment(nbytes)
    except OSError as error:
        raise RuntimeError(f"no memory for a message of {nbytes:,} bytes: {error.strerror}") from error


def _close(segments: list[SharedSegment]) -> None:
    for segment in segments:
        segment.close()


AREA = 64 << 10
"""Bytes of either place through which what is small goes (`Quick`)."""
FLAGS = (SLOTS + 1) * ALIGNED
"""Bytes of flags before the places."""
VIEWS = 1024
"""Sizes of which `Quick` keeps where they lie; prompts have ever new ones."""
_QUICK = SLOTS * WORDS


class Quick:
    """Sums, gathers and exchanges of a few kilobytes at once, with next to no work around them, one-shot.

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
        self._flags, self._peer_flags = transport.flags, transport.peer_flags
        self._peers, self._spin, self._maps = transport.peers, transport.spin, maps
        self._count = 0
        self._views: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """Sum, or maximum, over the ranks, in place; on every rank the same bits. tensor: contiguous."""
        combine: Callable[..., Tensor] = torch.maximum if maximum else torch.add
        with unwatched():
            flat = tensor.view(-1)
            pieces = self._exchange(flat)
            combine(pieces[0], pieces[1], out=flat)
            for other in pieces[2:]:
                combine(flat, other, out=flat)

    def all_gather(self, out: Tensor, piece: Tensor) -> None:
        """Every rank's `piece` end to end in `out`, as many bytes at a time as a place has. Both contiguous."""
        with unwatched():
            rows, flat = out.view(self.ranks, -1), piece.view(-1)
            step = AREA // flat.element_size()
            for start in range(0, flat.numel(), step):
                for row, piece_of in zip(rows, self._exchange(flat[start : start + step]), strict=True):
                    row[start : start + step].copy_(piece_of)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Every rank's equal part for this one end to end in `out`; `tensor` fits a place. Both contiguous."""
        with unwatched():
            for row, theirs in zip(out.view(self.ranks, -1), self._exchange(tensor.view(-1)), strict=True):
                row.copy_(theirs.view(self.ranks, -1)[self.rank])

    def _exchange(self, flat: Tensor) -> list[Tensor]:
        """Every rank's values, valid until the next exchange but one."""
        place = self._count % 2
        self._count = count = self._count + 1
        key = place, flat.numel(), flat.dtype
        views = self._views.get(key)
        if views is None:
            if len(self._views) == VIEWS:
                self._views.clear()
            start = FLAGS + place * AREA
            views = [torch.frombuffer(m, dtype=flat.dtype, count=flat.numel(), offset=start) for m in self._maps]
            self._views[key] = views
        views[self.rank].copy_(flat)
        self._flags[_QUICK] = count
        for peer in self._others:
            flags = self._peer_flags[peer]
            if flags[_QUICK] < count:
                self._spin.wait(flags, _QUICK, count, self._peers[peer])
        return views
