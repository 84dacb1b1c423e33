"""Block quantization on the wire: floating-point numbers to packed integers with a scale per block, and back.

A block's scale is its largest magnitude over the largest integer, so that no element is off by more than half a scale.
Numbers go through in chunks, whose transients stay small. The bytes are `layout.wire`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.layout.wire import BLOCK, SCALE, blocks, packed_bytes

LARGEST = {8: 127, 4: 7}
"""Bits -> the largest integer; the smallest is minus that."""
CHUNK = 128 * BLOCK
"""Elements that are converted at a time."""


def pack(numbers: Tensor, bits: int, into: Tensor) -> None:
    """Quantize flat `numbers` [n]. into: uint8 [`packed_bytes(n, bits)`]. Numbers that are not finite make their whole
    block NaN."""
    scales, values = _parts(into, len(numbers))
    for start, stop in _chunks(len(numbers)):
        rows = _rows(numbers[start:stop].float())
        scale = rows.abs().amax(1) / LARGEST[bits]
        scales[start // BLOCK : start // BLOCK + len(rows)] = scale
        # Where all are 0 the scale is too, and so is every integer.
        integers = (rows / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
        integers = integers.clamp_(-LARGEST[bits], LARGEST[bits]).view(-1)[: stop - start]
        if bits == 8:
            values[start:stop].copy_(integers.to(torch.int8).view(torch.uint8))
        else:
            _put_nibbles(integers, values[start // 2 : (stop + 1) // 2])


def unpack(packed: Tensor, bits: int, into: Tensor, *, add: bool = False) -> None:
    """The numbers of a packed piece, in the dtype of flat `into` [n]; added to it with `add`."""
    scales, values = _parts(packed, len(into))
    for start, stop in _chunks(len(into)):
        if bits == 8:
            integers = values[start:stop].view(torch.int8).float()
        else:
            integers = _nibbles(values[start // 2 : (stop + 1) // 2])[: stop - start]
        rows = _rows(integers)
        rows.mul_(scales[start // BLOCK : start // BLOCK + len(rows)][:, None])
        numbers = rows.view(-1)[: stop - start]
        if add:
            into[start:stop].add_(numbers)
        else:
            into[start:stop].copy_(numbers)


def _parts(packed: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """Scales [blocks] in fp32, and bytes of values."""
    head = blocks(elements) * SCALE
    return packed[:head].view(torch.float32), packed[head:]


def _chunks(elements: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + CHUNK, elements)) for start in range(0, elements, CHUNK))


def _rows(numbers: Tensor) -> Tensor:
    """[blocks, BLOCK], the last one filled up with zeros."""
    missing = -len(numbers) % BLOCK
    return torch.nn.functional.pad(numbers, (0, missing)).view(-1, BLOCK)


def _put_nibbles(integers: Tensor, into: Tensor) -> None:
    """Integers from -7 to 7, two to a byte, the first one in the lower half."""
    shifted = torch.nn.functional.pad(integers + 8, (0, len(integers) % 2)).to(torch.uint8)
    into.copy_(shifted[::2] | (shifted[1::2] << 4))


def _nibbles(values: Tensor) -> Tensor:
    """The integers in fp32, two for each byte."""
    return torch.stack((values & 15, values >> 4), 1).view(-1).float().sub_(8)


__all__ = ["pack", "packed_bytes", "unpack"]
