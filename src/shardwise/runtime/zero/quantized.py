"""Block quantization on the wire: floating-point numbers to packed integers with a scale per block, and back.

A block's scale is its largest magnitude over the largest integer, so that no element is off by more than half a scale.
Numbers go through in chunks, whose transients stay small. The bytes are `layout.wire`'s.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwise.layout.wire import BLOCK, CHUNK, SCALE, blocks
from shardwise.runtime.transport.buffers import Target

LARGEST = {8: 127, 4: 7}
"""Bits -> the largest integer; the smallest is minus that."""
ZERO = 8
"""What 0 is in 4 bits, which have no sign."""


def pack(numbers: Tensor, bits: int, into: Tensor, residual: Tensor | None = None) -> None:
    """Quantize flat `numbers` [n]. into: uint8 [`packed_bytes(n, bits)`]. Numbers that are not finite make their whole
    block NaN.

    residual: fp32 [n], the error of the last time: it is added first, and becomes the error of this time.
    """
    for start, stop in _chunks(len(numbers), numbers.device):
        _feed_chunk(numbers[start:stop], bits, into, start, len(numbers), residual)


def unpack(packed: Tensor, bits: int, into: Tensor) -> None:
    """The numbers of a packed piece, in the dtype of flat `into` [n]."""
    for start, stop in _chunks(len(into), into.device):
        into[start:stop].copy_(_unpacked_chunk(packed, bits, start, stop, len(into)))


def add_up_packed(pieces: Sequence[Tensor], bits: int, target: Target) -> None:
    """Put the sum of packed pieces into a flat tensor, or add it to what is there. The sum is in fp32, in the order of
    the pieces, and rounded once."""
    for start, stop, total in _sums(pieces, bits, len(target.tensor)):
        part = target.tensor[start:stop]
        part.copy_(total.add_(part) if target.adds else total)
        del total  # before the next one is made


def repack(pieces: Sequence[Tensor], bits: int, elements: int, into: Tensor, residual: Tensor | None = None) -> None:
    """Quantize the sum of packed pieces of so many elements, in fp32, into one packed piece. residual: as in `pack`."""
    for start, _, total in _sums(pieces, bits, elements):
        _feed_chunk(total, bits, into, start, elements, residual)
        del total  # before the next one is made


def _sums(pieces: Sequence[Tensor], bits: int, elements: int) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, sum) of each chunk."""
    for start, stop in _chunks(elements, pieces[0].device):
        total = _unpacked_chunk(pieces[0], bits, start, stop, elements)
        for piece in pieces[1:]:
            total.add_(_unpacked_chunk(piece, bits, start, stop, elements))
        yield start, stop, total
        del total


def _feed_chunk(numbers: Tensor, bits: int, into: Tensor, start: int, elements: int, residual: Tensor | None) -> None:
    """Quantize numbers that begin at `start` of a piece, with the error of the last time added to them."""
    if residual is None:
        _pack_chunk(numbers, bits, into, start, elements)
        return
    due = residual[start : start + len(numbers)]
    due.add_(numbers)
    _pack_chunk(due, bits, into, start, elements)
    due.sub_(_unpacked_chunk(into, bits, start, start + len(numbers), elements))


def _pack_chunk(numbers: Tensor, bits: int, into: Tensor, start: int, elements: int) -> None:
    """Quantize numbers that begin at `start` of a piece."""
    (scales, values), count = _parts(into, elements), len(numbers)
    rows = _rows(count, into.device)
    rows.view(-1)[:count].copy_(numbers)
    scale = torch.linalg.vector_norm(rows, torch.inf, 1) / LARGEST[bits]
    scales[start // BLOCK : start // BLOCK + len(rows)] = scale
    # Where all are 0 the scale is too, and so is every integer.
    rows.div_(scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_().clamp_(-LARGEST[bits], LARGEST[bits])
    if bits == 8:
        values[start : start + count].copy_(rows.view(-1)[:count].to(torch.int8).view(torch.uint8))
    else:  # two to a byte, the first one in the lower half
        positive = rows.add_(ZERO).view(-1)[: count + count % 2].to(torch.uint8)
        values[start // 2 :][: len(positive) // 2] = positive[::2] | (positive[1::2] << 4)


def _unpacked_chunk(packed: Tensor, bits: int, start: int, stop: int, elements: int) -> Tensor:
    """Elements [start, stop) of a piece in fp32."""
    (scales, values), count = _parts(packed, elements), stop - start
    rows = _rows(count, packed.device)
    if bits == 8:
        rows.view(-1)[:count].copy_(values[start:stop].view(torch.int8))
    else:
        pairs = rows.view(-1, 2)[: (count + 1) // 2]
        both = values[start // 2 :][: len(pairs)]
        pairs[:, 0].copy_(both & 15)
        pairs[:, 1].copy_(both >> 4)
        rows.sub_(ZERO)
    rows.mul_(scales[start // BLOCK : start // BLOCK + len(rows)][:, None])
    return rows.view(-1)[:count]


def _parts(packed: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """Scales [blocks] in fp32, and bytes of values."""
    head = blocks(elements) * SCALE
    return packed[:head].view(torch.float32), packed[head:]


def _chunks(elements: int, device: torch.device) -> Iterator[tuple[int, int]]:
    chunk = CHUNK[device.type]
    return ((start, min(start + chunk, elements)) for start in range(0, elements, chunk))


def _rows(elements: int, device: torch.device) -> Tensor:
    """Zeros in fp32, [blocks, BLOCK]."""
    return torch.zeros(blocks(elements), BLOCK, device=device)
