"""Pieces of tensors, and copying between them.

A box is a (start, stop) for each dim of a tensor. A `Piece` is an interval of the row-major positions inside a box: a
tensor-parallel rank holds a box, and its ZeRO shard is an interval of it, which is no box. Every piece is at most three
rectangles (the end of a row, whole rows, the start of a row), and two pieces share what their rectangles share: nine
strided copies at most, whatever the two layouts. Tensors have at most two dims; a vector is one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Box = tuple[tuple[int, int], ...]
Rectangle = tuple[int, int, int, int]
"""Rows [a, b) and columns [c, d) of a tensor, as (a, b, c, d)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions [first, last) of a box, counted row by row.

    A box may reach beyond its tensor: that is how the padding of a tensor-parallel rank appears, and nothing is ever
    copied from or to there.
    """

    box: Box
    first: int
    last: int

    @classmethod
    def whole(cls, box: Box) -> Piece:
        return cls(box, 0, volume(box))

    @property
    def numel(self) -> int:
        return self.last - self.first

    def part(self, start: int, stop: int) -> Piece:
        """Elements [start, stop) of this piece."""
        return Piece(self.box, self.first + start, min(self.first + stop, self.last))

    def inside(self, box: Box) -> Piece:
        """The piece of `box`, which lies within this piece's own box, that holds the elements both share.

        Row-major order is the same in both, so that what is an interval here is one there.
        """
        return Piece(box, _before(self.box, self.first, box), _before(self.box, self.last, box))

    def rectangles(self) -> list[Rectangle]:
        """The elements as at most three rectangles of the tensor, in order."""
        if self.first >= self.last:
            return []
        row, _, left, right = matrix(self.box)
        (top, start), (bottom, stop) = divmod(self.first, right - left), divmod(self.last, right - left)
        if top == bottom:
            return [(row + top, row + top + 1, left + start, left + stop)]
        found = []
        if start:
            found.append((row + top, row + top + 1, left + start, right))
            top += 1
        if top < bottom:
            found.append((row + top, row + bottom, left, right))
        if stop:
            found.append((row + bottom, row + bottom + 1, left, left + stop))
        return found

    def reach(self, other: Piece) -> tuple[int, int]:
        """[start, stop) of this piece's elements, outside of which none is also in `other`."""
        common = shared(self, other)
        if not common:
            return 0, 0
        row, _, left, right = matrix(self.box)
        width = right - left
        start = min((a - row) * width + c - left for a, _, c, _ in common)
        stop = max((b - 1 - row) * width + d - left for _, b, _, d in common)
        return start - self.first, stop - self.first


def volume(box: Box) -> int:
    """Elements of a box."""
    return math.prod(stop - start for start, stop in box)


def full(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def matrix(box: Box) -> Rectangle:
    """A box as a rectangle: a vector is one row."""
    if len(box) == 2:
        return (*box[0], *box[1])
    return (0, 1, *box[0]) if box else (0, 1, 0, 1)


def _before(outer: Box, position: int, inner: Box) -> int:
    top, _, left, right = matrix(outer)
    if left == right:
        return 0
    row, column = divmod(position, right - left)
    row, column = row + top, column + left
    first, last, start, stop = matrix(inner)
    if row < first:
        return 0
    if row >= last:
        return (last - first) * (stop - start)
    return (row - first) * (stop - start) + min(max(column - start, 0), stop - start)


def shared(a: Piece, b: Piece) -> list[Rectangle]:
    """The rectangles that hold what two pieces of one tensor have in common."""
    found = []
    others = b.rectangles()
    for top, bottom, left, right in a.rectangles():
        for rectangle in others:
            r0, r1 = max(top, rectangle[0]), min(bottom, rectangle[1])
            c0, c1 = max(left, rectangle[2]), min(right, rectangle[3])
            if r0 < r1 and c0 < c1:
                found.append((r0, r1, c0, c1))
    return found


def copy(target: np.ndarray, to: Piece, source: np.ndarray, of: Piece) -> None:
    """Copy what `to` and `of` share from `source` into `target`: contiguous vectors, the elements of their pieces."""
    assert target.shape == (to.numel,) and target.flags.c_contiguous, "a view by reshape needs a contiguous vector"
    assert source.shape == (of.numel,) and source.flags.c_contiguous
    for rectangle in shared(to, of):
        _view(target, to, rectangle)[...] = _view(source, of, rectangle)


def _view(array: np.ndarray, piece: Piece, rectangle: Rectangle) -> np.ndarray:
    """The elements of `rectangle`, which lies within one of the piece's own, as a matrix."""
    top, _, left, right = matrix(piece.box)
    a, b, c, d = rectangle
    start = (a - top) * (right - left) - piece.first
    if b - a == 1:
        return array[start + c - left : start + d - left].reshape(1, d - c)
    return array[start : start + (b - a) * (right - left)].reshape(b - a, right - left)[:, c - left : d - left]


def tiles(shape: tuple[int, ...], pieces: Iterable[Piece]) -> bool:
    """Whether pieces that lie inside a tensor hold each of its elements exactly once.

    Rectangles tile a rectangle exactly when their areas add up to its area and, but for its own four corners, every
    point is a corner of an even number of them: then each element is covered an odd number of times.
    """
    corners: set[tuple[int, int]] = set()
    area = 0
    for piece in pieces:
        for a, b, c, d in piece.rectangles():
            area += (b - a) * (d - c)
            corners ^= {(a, c), (a, d), (b, c), (b, d)}
    a, b, c, d = matrix(full(shape))
    return area == (b - a) * (d - c) and corners == {(a, c), (a, d), (b, c), (b, d)}
