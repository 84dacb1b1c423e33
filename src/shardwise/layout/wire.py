"""Block-quantized numbers on the wire (ZeRO++'s qwZ and qgZ): their bytes.

Elements go in blocks of `BLOCK`, each with one fp32 scale. A packed piece is all of its scales, then its values end to
end, filled up to a multiple of 4 bytes, so that pieces one after the other keep their scales aligned. Source: Wang et
al. 2023, ZeRO++, section 3.

A rank's interval is packed run by run: no block has elements of parameters that tensor parallelism splits and of others
that it replicates, whose scales must be equal on all tp ranks.
"""

from collections.abc import Iterable
from typing import NamedTuple

BLOCK = 256
"""Elements that share a scale."""
SCALE = 4
"""Bytes of a scale."""
CHUNK = {"cpu": 128 * BLOCK, "cuda": 16384 * BLOCK}
"""Elements that are converted at a time: on a CPU what its cache holds; on a GPU many more, since the host takes longer
to call the operations than the device takes for a small chunk."""
WIRE_DTYPE = "uint8"
"""dtype of packed pieces in a ledger: each element is a byte."""


def blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def packed_bytes(elements: int, bits: int) -> int:
    """Bytes of a packed piece of so many elements of `bits` bits."""
    values = -(-elements * bits // 8)
    return blocks(elements) * SCALE + -(-values // SCALE) * SCALE


class PackedRun(NamedTuple):
    """A run of an interval's elements with blocks of its own."""

    elements: slice
    """Of the interval."""
    packed: slice
    """Bytes of the packed interval."""


def packed_runs(cuts: Iterable[tuple[int, int]], bits: int) -> tuple[PackedRun, ...]:
    """The packed pieces of an interval's runs [start, stop), one after the other."""
    runs, at = [], 0
    for start, stop in cuts:
        nbytes = packed_bytes(stop - start, bits)
        runs.append(PackedRun(slice(start, stop), slice(at, at + nbytes)))
        at += nbytes
    return tuple(runs)


def packing_bytes(elements: int, device: str) -> int:
    """Transient bytes while a piece is packed in 4 bits: a chunk in fp32, in bytes, and as halves of bytes. device:
    "cpu" or "cuda"."""
    return 6 * blocks(min(elements, CHUNK[device])) * BLOCK


def adding_bytes(elements: int, again: bool, device: str) -> int:
    """Transient bytes while packed pieces of so many elements are added up: a chunk of the sum and of a piece in fp32
    and as halves of bytes. again: the sum is packed again."""
    chunk = blocks(min(elements, CHUNK[device])) * BLOCK
    return max(8 * chunk + chunk // 2, 4 * chunk + packing_bytes(elements, device) if again else 0)
