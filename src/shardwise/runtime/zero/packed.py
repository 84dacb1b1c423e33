"""A unit's weights in 8 bits on the wire of a gather (ZeRO++'s qwZ)."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.layout.units import WEIGHT_BITS, Unit
from shardwise.runtime.transport.buffers import Buffer, ByteCounter
from shardwise.runtime.zero.quantized import pack, unpack


class PackedWeights:
    """A rank's packed interval, which stays for all gathers of a step, and the buffer where all ranks' come together.

    place: of this rank's interval among those of the unit. wire: for the packed intervals of all ranks.
    """

    def __init__(self, unit: Unit, place: int, wire: Buffer, device: torch.device, tally: ByteCounter) -> None:
        nbytes = unit.packed_bytes(WEIGHT_BITS)
        self.own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._unit, self._place = unit, place
        self._gathered, self._wire = nbytes * unit.shard_ranks, wire
        tally.add("comm", nbytes)

    def quantize(self, interval: Tensor) -> None:
        """Pack this rank's weights as they are now."""
        for run in self._unit.packed_runs(self._place, WEIGHT_BITS):
            pack(interval[run.elements], WEIGHT_BITS, self.own[run.packed])

    def take(self) -> Tensor:
        """Memory for all ranks' packed intervals, until `free`."""
        return self._wire.take(self._gathered)

    def unpack(self, whole: Tensor) -> None:
        """The whole unit from what was gathered. A lasting buffer is then free again."""
        pieces = self._wire.tensor[: self._gathered].split(len(self.own))
        for place, (packed, piece) in enumerate(zip(pieces, whole.chunk(len(pieces)), strict=True)):
            for run in self._unit.packed_runs(place, WEIGHT_BITS):
                unpack(packed[run.packed], WEIGHT_BITS, piece[run.elements])
        if self._wire.lasting:
            self.free()

    def free(self) -> None:
        self._wire.free()
