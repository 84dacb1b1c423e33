"""Block-quantized numbers on the wire (ZeRO++'s qwZ and qgZ): their bytes.

Elements go in blocks of `BLOCK`, each with one fp32 scale. A packed piece is all of its scales, then its values end to
end, filled up to a multiple of 4 bytes, so that pieces one after the other keep their scales aligned. Source: Wang et
al. 2023, ZeRO++, section 3.
"""

from __future__ import annotations

BLOCK = 256
"""Elements that share a scale."""
SCALE = 4
"""Bytes of a scale."""
WIRE_DTYPE = "uint8"
"""dtype of packed pieces in a ledger: each element is a byte."""


def blocks(elements: int) -> int:
    """Scales of so many elements."""
    return -(-elements // BLOCK)


def packed_bytes(elements: int, bits: int) -> int:
    """Bytes of a packed piece of so many elements of `bits` bits."""
    values = -(-elements * bits // 8)
    return blocks(elements) * SCALE + -(-values // SCALE) * SCALE
