"""The sum of a unit's gradients over its shard group in 4 bits on the wire (ZeRO++'s qgZ).

Each rank packs the pieces of its full gradient, one for each rank's interval, exchanges them by an all-to-all, and adds
up what it has received in fp32. In two hops ranks that are near each other do so first, with the intervals of one place
among the near ranks for each of them; the sums are packed again, and go on to the rank of that interval.

Under error feedback the error of each piece that a rank packs is added to the piece that it packs there the next time.

Errors of a unit's packed gradients that are fed back into its next ones (error feedback beside ZeRO++'s qgZ).

A rank keeps the error of each of its packed pieces: over all steps, the true sum of the gradients is the sum that was
sent, plus the residuals that all ranks have now. That total is independent of the layout, and is what a checkpoint has:
which rank feeds an element's residual back does not matter. Source: Seide et al. 2014, "1-bit stochastic gradient
descent"; Xie et al. 2024, LoCo (arXiv 2407.04480), which feeds errors back in ZeRO++.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.layout.unit import GRADIENT_BITS, Hop, Unit
from shardwise.runtime.transport.buffers import ByteCounter, Target
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.protocol import Work
from shardwise.runtime.zero.quantized import add_up_packed, pack, repack


class Residuals:
    """One rank's residuals of one unit, in fp32.

    first: of its own gradient [padded]. second: of the sums among near ranks that it packs again, one piece for each
    group of them [groups x shard_numel]; empty in one hop.
    """

    def __init__(self, unit: Unit, sizes: tuple[int, int], device: torch.device, tally: ByteCounter) -> None:
        self._unit = unit
        self.first, self.second = (torch.zeros(elements, device=device) for elements in sizes)
        tally.add("comm", self.first.nbytes + self.second.nbytes)

    def folded(self, comms: Comms) -> Tensor:
        """The sum of all ranks' residuals over this rank's interval [shard_numel]. All ranks that reduce the unit call
        this together."""
        unit, every = self._unit, self.first.clone()
        if len(self.second):
            # The near rank k packs again what goes to the k-th rank of each group.
            places = every.view(-1, unit.shard_numel)[comms.index(unit.again) :: unit.copy_ranks]
            places.add_(self.second.view_as(places))
        comms.all_reduce(every, unit.sharded_over, unit.name)
        own = every[self._own(comms)].clone()
        comms.all_reduce(own, unit.replicate, unit.name)
        return own

    def restore(self, comms: Comms) -> Tensor | None:
        """Drop all residuals; the memory for those of this rank's interval [shard_numel], None where another rank feeds
        them back."""
        self.drop()
        return self.first[self._own(comms)] if comms.index(self._unit.replicate) == 0 else None

    def drop(self) -> None:
        self.first.zero_()
        self.second.zero_()

    def _own(self, comms: Comms) -> slice:
        start = comms.index(self._unit.sharded_over) * self._unit.shard_numel
        return slice(start, start + self._unit.shard_numel)


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
        into, own = self._into(), self._comms.index(self._unit.sharded_over)
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
