"""A safetensors file by anyone: its header, checked in full, and rectangles of its tensors, read without the rest."""

import json
import math
import os
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.dtypes import CODES, numpy_dtype, raw
from shardwise.checkpoint.file_io import opened, read_exactly
from shardwise.checkpoint.manifest import TensorSpec
from shardwise.errors import UserError

BAND = 16 << 20
"""Bytes that are in memory at once while a tensor is read."""

_PAGE = 4096
"""A gap of at most so many bytes is read rather than skipped: the disk delivers it anyway."""

_LONGEST = 100_000_000
"""Bytes of the longest header that the format allows."""

_WEIGHTS = "weights are"
_DTYPES = {code: name for name, code in CODES.items()}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file: its elements start at byte `offset`."""

    path: Path
    name: str
    spec: TensorSpec
    offset: int

    def bands(self, top: int, bottom: int, left: int, right: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, matrix) of bands of rows [top, bottom) and columns [left, right), in order.

        A vector is one column. Raises `UserError` naming file and tensor when it cannot be read.
        """
        shape = self.spec.shape
        width = shape[1] if len(shape) == 2 else 1
        dtype = numpy_dtype(self.spec.dtype)
        skips = (width - (right - left)) * dtype.itemsize > _PAGE
        held = right - left if skips else width
        step = max(1, BAND // max(1, held * dtype.itemsize))
        with opened(self.path, _WEIGHTS) as file:
            for row in range(top, bottom, step):
                values = np.empty((min(step, bottom - row), held), dtype)
                if skips:
                    for i, line in enumerate(values):
                        self._fill(file.fileno(), line, (row + i) * width + left)
                else:
                    self._fill(file.fileno(), values, row * width)
                yield row, values if skips else values[:, left:right]

    def _fill(self, handle: int, values: np.ndarray, first: int) -> None:
        """Read elements [first, first + size) of the tensor."""
        short = f"{self.path} is cut short: {self.name} is not whole"
        offset = self.offset + first * values.itemsize
        read_exactly(handle, raw(values), offset, f"{self.name} of {self.path}", short)


def tensors_of(path: Path) -> dict[str, FileTensor]:
    """The tensors of a file by name; only its header is read.

    Raises `UserError` naming the file, and the tensor where one is wrong, when it is no safetensors file, is cut short
    or holds elements that are not floating-point numbers of 2 to 8 bytes.
    """
    with opened(path, _WEIGHTS) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(_LONGEST, size - 8):
            raise UserError(f"{path} is no safetensors file, or is cut short")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: its header is not JSON") from None
    if not isinstance(header, dict):
        raise UserError(f"{path} is damaged: its header is no JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _tensor(path, name, entry, start, size) for name, entry in header.items()}
    _check_apart(path, {name: tuple(entry["data_offsets"]) for name, entry in header.items()})
    return tensors


def _check_apart(path: Path, places: dict[str, tuple[int, int]]) -> None:
    """Raise `UserError` for tensors that share bytes, which the format excludes."""
    before, end = "", 0
    for name, (first, last) in sorted(places.items(), key=lambda item: item[1]):
        if first < end and first < last:
            raise UserError(f"{path} is damaged: {name} and {before} share bytes")
        if last > end:
            before, end = name, last


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> FileTensor:
    if not 0 < len(name) <= 1000 or not name.isprintable():
        raise UserError(f"{path} is damaged: {reprlib.repr(name)} is no name of a tensor")
    what = f"{path}: {name}"
    try:
        code, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, first, last]
    except (TypeError, KeyError, ValueError):
        raise UserError(f"{what} is not described as safetensors describes a tensor") from None
    if any(type(n) is not int or n < 0 for n in numbers) or last < first:
        raise UserError(f"{what} has a shape or place that no tensor can have")
    if start + last > size:
        raise UserError(f"{path} is cut short: {name} should end at byte {start + last} of {size}")
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        # Buffers such as masks may be anything: only a parameter must be readable.
        return FileTensor(path, name, TensorSpec(tuple(shape), str(code)), start + first)
    if math.prod(shape) * numpy_dtype(dtype).itemsize != last - first:
        raise UserError(f"{what} has {last - first} bytes, which is not its shape {shape} in {dtype}")
    return FileTensor(path, name, TensorSpec(tuple(shape), dtype), start + first)
