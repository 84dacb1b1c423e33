"""A unit's weights in 8 bits on the wire of a gather (ZeRO++'s qwZ)."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.layout.units import WEIGHT_BITS
from shardwise.runtime.transport.buffers import Buffer, ByteCounter
from shardwise.runtime.zero.quantized import pack, unpack


class PackedWeights:
    """A rank's packed interval, which stays for all gathers of a step, and the buffer where all ranks' come together.

    nbytes: of one interval. wire: for at least as many times that as there are ranks.
    """

    def __init__(self, nbytes: int, ranks: int, wire: Buffer, device: torch.device, tally: ByteCounter) -> None:
        self.own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._gathered, self._wire = nbytes * ranks, wire
        tally.add("comm", nbytes)

    def quantize(self, interval: Tensor) -> None:
        """Pack this rank's weights as they are now."""
        pack(interval, WEIGHT_BITS, self.own)

    def take(self) -> Tensor:
        """Memory for all ranks' packed intervals, until `free`."""
        return self._wire.take(self._gathered)

    def unpack(self, whole: Tensor) -> None:
        """The whole unit from what was gathered. A lasting buffer is then free again."""
        pieces = self._wire.tensor[: self._gathered].split(len(self.own))
        for packed, piece in zip(pieces, whole.chunk(len(pieces)), strict=True):
            unpack(packed, WEIGHT_BITS, piece)
        if self._wire.lasting:
            self.free()

    def free(self) -> None:
        self._wire.free()
