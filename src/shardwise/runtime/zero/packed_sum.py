"""The sum of a unit's gradients over its shard group in 4 bits on the wire (ZeRO++'s qgZ).

Each rank packs the pieces of its full gradient, one for each rank's interval, exchanges them by an all-to-all, and adds
up what it has received in fp32. In two hops ranks that are near each other do so first, with the intervals of one place
among the near ranks for each of them; the sums are packed again, and go on to the rank of that interval.

Under error feedback the error of each piece that a rank packs is added to the piece that it packs there the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from shardwise.layout.units import GRADIENT_BITS, Hop, Unit
from shardwise.runtime.transport.adding import Target
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.protocol import Work
from shardwise.runtime.zero.quantized import add_up_packed, pack, repack
from shardwise.runtime.zero.residuals import Residuals


class PackedSum:
    """One reduction under way; `wait` ends it.

    full: the unit's gradient [padded], which is not needed once this is made. room: uint8, for twice a packed piece of
    every rank. hops: all-to-alls over the unit's shard group, or first over its near ranks. into: where this rank's
    interval of the sum goes, called when it is made. done: called after it. residuals: None without error feedback.
    """

    def __init__(
        self,
        comms: Comms,
        unit: Unit,
        full: Tensor,
        room: Tensor,
        into: Callable[[], Target],
        done: Callable[[], object],
        residuals: Residuals | None = None,
    ) -> None:
        self._comms, self._unit, self._into, self._done = comms, unit, into, done
        self._hops = [hop for hop in unit.reduce if hop.op == "all_to_all"]
        self._sent, self._received = room.view(2, unit.shard_ranks, -1)
        self._errors: list[Sequence[Tensor | None]] = [[None] * unit.shard_ranks] * 2
        far = unit.shard_ranks // comms.size(self._hops[0].axes)
        # Rank (f, k) is the k-th near one of the f-th group: first all pieces for k = 0 go to the near rank 0.
        pieces = partial(_in_order_sent, far=far, elements=unit.shard_numel)
        if residuals is not None:
            self._errors = [pieces(residuals.first), residuals.second.view(-1, unit.shard_numel).unbind()]
        for piece, packed, error in zip(pieces(full), self._sent, self._errors[0], strict=True):
            pack(piece, GRADIENT_BITS, packed, error)
        self._work: Work | None = self._exchange(self._hops[0], unit.shard_ranks)

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        pieces = self._summands(self._hops[0], self._unit.shard_ranks)
        for hop in self._hops[1:]:
            for place, summands in enumerate(pieces):
                repack(summands, GRADIENT_BITS, self._unit.shard_numel, self._sent[place], self._errors[1][place])
            self._exchange(hop, len(pieces)).wait()
            pieces = self._summands(hop, len(pieces))
        (summands,) = pieces
        add_up_packed(summands, GRADIENT_BITS, self._into())
        self._work = None
        self._done()

    def is_completed(self) -> bool:
        return self._work is None

    def _exchange(self, hop: Hop, pieces: int) -> Work:
        """Give every rank of a hop its share of the first `pieces` packed pieces."""
        out, tensor = self._received[:pieces].view(-1), self._sent[:pieces].view(-1)
        with self._comms.in_phase("backward"):
            return self._comms.all_to_all(out, tensor, hop.axes, self._unit.name, later=True)

    def _summands(self, hop: Hop, pieces: int) -> list[list[Tensor]]:
        """For each piece that this rank is to add up, what every rank of the hop has sent of it."""
        by_rank = self._received[:pieces].view(self._comms.size(hop.axes), -1, self._received.shape[1])
        return [list(each) for each in by_rank.transpose(0, 1)]


def _in_order_sent(full: Tensor, far: int, elements: int) -> Sequence[Tensor]:
    """Views of the interval of each rank, those of each near rank's places together."""
    return [piece for places in full.view(far, -1, elements).unbind(1) for piece in places.unbind()]
