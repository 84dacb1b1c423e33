"""Errors of a unit's packed gradients that are fed back into its next ones (error feedback beside ZeRO++'s qgZ).

A rank keeps the error of each of its packed pieces: over all steps, the true sum of the gradients is the sum that was
sent, plus the residuals that all ranks have now. That total is independent of the layout, and is what a checkpoint has:
which rank feeds an element's residual back does not matter. Source: Seide et al. 2014, "1-bit stochastic gradient
descent"; Xie et al. 2024, LoCo (arXiv 2407.04480), which feeds errors back in ZeRO++.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.layout.units import Unit
from shardwise.runtime.transport.buffers import ByteCounter
from shardwise.runtime.transport.comms import Comms


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
        comms.all_reduce(every, unit.shard, unit.name)
        own = every[self._own(comms)].clone()
        comms.all_reduce(own, unit.replicate, unit.name)
        return own

    def restore(self, comms: Comms) -> Tensor | None:
        """Drop all residuals; the memory for those of this rank's interval [shard_numel], None where another rank feeds
        them back."""
        self.drop()
        return self.first[self._own(comms)] if comms.index(self._unit.replicate) == 0 else None

    def drop(self) -> None:
        """Drop all residuals on this rank."""
        self.first.zero_()
        self.second.zero_()

    def _own(self, comms: Comms) -> slice:
        start = comms.index(self._unit.shard) * self._unit.shard_numel
        return slice(start, start + self._unit.shard_numel)
