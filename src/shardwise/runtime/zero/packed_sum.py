"""The sum of a unit's gradients over its shard group in 4 bits on the wire (ZeRO++'s qgZ).

Each rank packs the pieces of its full gradient, one for each rank's interval, exchanges them by an all-to-all, and adds
up what it has received in fp32. In two hops ranks that are near each other do so first, with the intervals of one place
among the near ranks for each of them; the sums are packed again, and go on to the rank of that interval.

Under error feedback the error of each piece that a rank packs is added to the piece that it packs there the next time.
"""

from __future__ import annotations

from collections.abc import Callable

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
        self._residuals = residuals
        self._hops = [hop for hop in unit.reduce if hop.op == "all_to_all"]
        self._sent, self._received = room.view(2, unit.shard_ranks, -1)
        near = comms.size(self._hops[0].axes)
        far, full = unit.shard_ranks // near, full.view(unit.shard_ranks, -1)
        # Rank (f, k) is the k-th near one of the f-th group: first all pieces for k = 0 go to the near rank 0.
        order = [f * near + k for k in range(near) for f in range(far)]
        for rank, packed in zip(order, self._sent, strict=True):
            for run in unit.packed_runs(rank, GRADIENT_BITS):
                error = None if residuals is None else residuals.first.view(full.shape)[rank, run.elements]
                pack(full[rank, run.elements], GRADIENT_BITS, packed[run.packed], error)
        self._work: Work | None = self._exchange(self._hops[0], unit.shard_ranks)

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        pieces = self._summands(self._hops[0], self._unit.shard_ranks)
        for hop in self._hops[1:]:
            self._repack(pieces)
            self._exchange(hop, len(pieces)).wait()
            pieces = self._summands(hop, len(pieces))
        (summands,) = pieces
        into, own = self._into(), self._comms.index(self._unit.shard)
        for run in self._unit.packed_runs(own, GRADIENT_BITS):
            target = Target(into.tensor[run.elements], into.adds)
            add_up_packed([piece[run.packed] for piece in summands], GRADIENT_BITS, target)
        self._work = None
        self._done()

    def _repack(self, pieces: list[list[Tensor]]) -> None:
        """Pack the sums among near ranks, one for each group's rank with this rank's place."""
        near, place = (of(self._hops[0].axes) for of in (self._comms.size, self._comms.index))
        for group, summands in enumerate(pieces):
            for run in self._unit.packed_runs(group * near + place, GRADIENT_BITS):
                error = None
                if self._residuals is not None:
                    error = self._residuals.second.view(len(pieces), -1)[group, run.elements]
                elements = run.elements.stop - run.elements.start
                packed = [piece[run.packed] for piece in summands]
                repack(packed, GRADIENT_BITS, elements, self._sent[group, run.packed], error)

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
