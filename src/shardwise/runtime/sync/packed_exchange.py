"""The sum of a unit's outer gradients over the replicas with few bits on the wire, under error feedback.

Each replica packs the pieces of its outer gradient, one for every replica, and gets by an all-to-all what the others
have packed of its own piece. It packs the sum of these again, and an all-gather brings all sums together. The error of
each packed piece is added to what is packed there the next time, as in `zero.packed_sum`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.layout.axes import REPLICA
from shardwise.layout.outer import OuterPieces
from shardwise.layout.wire import WIRE_DTYPE, PackedRun
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.flat_unit import torch_dtype
from shardwise.runtime.zero.quantized import pack, repack, unpack


class PackedExchange:
    """The exchange of one unit.

    home: device of the residuals between outer steps.
    """

    def __init__(
        self, unit: str, pieces: OuterPieces, sizes: tuple[int, int], comms: Comms, home: torch.device
    ) -> None:
        self._unit, self._pieces, self._comms = unit, pieces, comms
        self.first, self.second = (torch.zeros(elements, device=home) for elements in sizes)
        """Errors of this rank's outer gradient [interval], and of the sums of its piece [piece]; fp32."""

    def sum(self, numbers: Tensor) -> None:
        """Put the sum over the replicas in place of this rank's outer gradient [interval]. All replicas call this
        together."""
        pieces, own = self._pieces, self._comms.index(REPLICA)
        first, second = self.first.to(numbers.device), self.second.to(numbers.device)
        shape, dtype = (pieces.count, pieces.nbytes), torch_dtype(WIRE_DTYPE)
        sent = torch.zeros(shape, dtype=dtype, device=numbers.device)
        received = torch.empty(shape, dtype=dtype, device=numbers.device)
        for piece, elements, run in self._runs():
            pack(numbers[elements], pieces.bits, sent[piece, run.packed], first[elements])
        self._comms.all_to_all(received.view(-1), sent.view(-1), REPLICA, self._unit)
        for run in pieces.runs(own):
            parts = [part[run.packed] for part in received]
            elements = run.elements.stop - run.elements.start
            repack(parts, pieces.bits, elements, sent[own, run.packed], second[run.elements])
        self._comms.all_gather(received.view(-1), sent[own], REPLICA, self._unit)
        for piece, elements, run in self._runs():
            unpack(received[piece, run.packed], pieces.bits, numbers[elements])
        for kept, now in ((self.first, first), (self.second, second)):
            if kept is not now:
                kept.copy_(now)

    def mean_error(self) -> Tensor:
        """What each replica would have to add to its next outer gradient to make up for all that was lost [interval].
        All replicas call this together."""
        every = self.first.clone()
        start = self._comms.index(REPLICA) * self._pieces.elements
        mine = every[start : start + self._pieces.elements]
        mine.add_(self.second[: len(mine)])
        moved = self._comms.reachable(every)
        self._comms.all_reduce(moved, REPLICA, self._unit)
        return every.copy_(moved).div_(self._pieces.count)

    def restore(self, error: Tensor | None) -> None:
        """Set the residuals to those of `mean_error`; None: to zero."""
        self.second.zero_()
        if error is None:
            self.first.zero_()
        else:
            self.first.copy_(error)

    def _runs(self) -> Iterator[tuple[int, slice, PackedRun]]:
        """(piece, elements of the interval, run) of all pieces."""
        for piece in range(self._pieces.count):
            start = piece * self._pieces.elements
            for run in self._pieces.runs(piece):
                yield piece, slice(start + run.elements.start, start + run.elements.stop), run
