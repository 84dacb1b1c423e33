"""Messages between processes of one host, through memory that they share: `Mail`.

A message lies in a segment of its sender's: one whose last message has been taken, or else a new one. So a send never
waits, whatever the receiver does, and the tensor is the sender's again at once. Between two ranks messages are taken by
the order in which they were sent, though a receive that was posted later may be waited for first.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from shardwise.runtime.transport.memory import ALIGNED, Patience, Segment
from shardwise.runtime.transport.shared import SharedTransport, flat_array

OUTSTANDING = 4096
"""Messages to one rank that may lie there untaken; more than that, and a send waits."""

PAGE = 4096
"""Bytes of which segments have a multiple."""

_WORDS = ALIGNED // 8
_RING, _TAKEN = _WORDS, _WORDS + OUTSTANDING
_EACH = _WORDS + 2 * OUTSTANDING
"""Words for each peer: how many messages were sent to it, where each lies, and which of its messages were taken."""


class Mail:
    """One rank's end of the messages among the ranks of `transport`, whose peers it uses; every one must make it.

    group: their process group, over which they meet here. timeout: seconds to wait for a message. Raises
    `RuntimeError` where memory runs out: the ranks have agreed by then that they share it.
    """

    def __init__(self, transport: SharedTransport, group: dist.ProcessGroup, timeout: float) -> None:
        self.rank, self.peers = transport.rank, transport.peers
        self.patience = Patience(transport.ranks, len(os.sched_getaffinity(0)), timeout)
        self._segments = [_segment(transport.ranks * _EACH * 8)]
        self._own = memoryview(self._segments[0].map).cast("q")
        serials: list[Any] = [None] * transport.ranks
        dist.all_gather_object(serials, self._segments[0].serial, group=group)
        self._theirs = [memoryview(p.map(serial)).cast("q") for p, serial in zip(self.peers, serials, strict=True)]
        self._sent, self._posted = [0] * transport.ranks, [0] * transport.ranks
        self._under_way: list[dict[int, Segment]] = [{} for _ in self.peers]
        self._free: list[list[Segment]] = [[] for _ in self.peers]
        self.close = weakref.finalize(self, _close, self._segments)

    def send(self, tensor: Tensor, peer: int) -> Sent:
        """Leave a contiguous tensor for `peer`. Raises `RuntimeError` when it has ended or takes nothing for too
        long, or where memory runs out."""
        number, array = self._sent[peer], flat_array(tensor)
        self._sent[peer] += 1
        if number >= OUTSTANDING:
            at = self.rank * _EACH + _TAKEN + number % OUTSTANDING
            self.patience.wait(self._theirs[peer], at, number - OUTSTANDING + 1, self.peers[peer])
        segment = self._place(peer, array.nbytes)
        segment.bytes[: array.nbytes].view(array.dtype)[:] = array
        self._under_way[peer][number] = segment
        mine = peer * _EACH
        self._own[mine + _RING + number % OUTSTANDING] = segment.serial
        self._own[mine] = number + 1
        return Sent()

    @property
    def shared_bytes(self) -> int:
        """Of all segments that this rank has made."""
        return sum(segment.nbytes for segment in self._segments)

    def _place(self, peer: int, nbytes: int) -> Segment:
        """A segment of `nbytes` or more with no message in it."""
        taken, under_way, free = self._theirs[peer], self._under_way[peer], self._free[peer]
        for number in list(under_way):
            if taken[self.rank * _EACH + _TAKEN + number % OUTSTANDING] > number:
                free.append(under_way.pop(number))
        if fits := [segment for segment in free if segment.nbytes >= nbytes]:
            # The smallest: a small message in the place of a large one would have that make another.
            found = min(fits, key=lambda segment: segment.nbytes)
            free.remove(found)
            return found
        self._segments.append(_segment(_room(nbytes)))
        return self._segments[-1]

    def receive(self, out: Tensor, peer: int) -> Arriving:
        """Post the receive of the next message of `peer` into a contiguous tensor of its size."""
        number = self._posted[peer]
        self._posted[peer] += 1
        return Arriving(self, out, peer, number)

    def take(self, out: Tensor, peer: int, number: int) -> None:
        """Wait for message `number` of `peer` and copy it."""
        theirs, at = self._theirs[peer], self.rank * _EACH
        if theirs[at] <= number:
            self.patience.wait(theirs, at, number + 1, self.peers[peer])
        array = flat_array(out)
        found = np.frombuffer(self.peers[peer].map(theirs[at + _RING + number % OUTSTANDING]), np.uint8)
        array[:] = found[: array.nbytes].view(array.dtype)
        self._own[peer * _EACH + _TAKEN + number % OUTSTANDING] = number + 1


class Sent:
    """A message that has left: its tensor is free."""

    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True


class Arriving:
    """A message to come. `wait` has it in its tensor."""

    def __init__(self, mail: Mail, out: Tensor, peer: int, number: int) -> None:
        self._mail, self._out, self._peer, self._number = mail, out, peer, number

    def wait(self) -> None:
        self._mail.take(self._out, self._peer, self._number)


def _room(nbytes: int) -> int:
    """Bytes of a segment for a message of so many: at most a quarter more, beyond some pages.

    Messages come in any size, as prompts do, and their segments stay: with four sizes from one power of two to the next
    they do not add up.
    """
    step = max(PAGE, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(1, -(-nbytes // step)) * step


def _segment(nbytes: int) -> Segment:
    try:
        return Segment(nbytes)
    except OSError as error:
        raise RuntimeError(f"no memory for a message of {nbytes:,} bytes: {error.strerror}") from error


def _close(segments: list[Segment]) -> None:
    for segment in segments:
        segment.close()
