"""Tensors under other names, out of a checkpoint: fused, transposed or one per expert, one band of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardwise.checkpoint.dtypes import bits, numpy_dtype
from shardwise.checkpoint.geometry import Piece
from shardwise.checkpoint.manifest import TensorSpec
from shardwise.model.blueprint import ForeignSlice
from shardwise.model.config import ModelConfig
from shardwise.model.parameters import parameters

BAND = 64 << 20
"""Bytes of a tensor that are in memory at once. A transposed tensor is read again for each band of it."""


class ReadsWeights(Protocol):
    """A checkpoint, or other weights, as far as an export reads them."""

    def read(self, tensor: str, piece: Piece, dtype: str) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """A tensor to write."""

    name: str
    spec: TensorSpec
    parts: list[tuple[str, int, int, ForeignSlice]]
    """(parameter, first row, rows, their slice of the tensor) of the parameters that it consists of."""


def export_tensors(model: ModelConfig, dtype: str) -> list[ExportTensor]:
    """Tensors to write, in the model's order."""
    found: dict[str, ExportTensor] = {}
    for p in parameters(model):
        assert p.foreign
        rows = p.shape[0] // p.foreign.tensors
        for first, place in p.foreign.each(p.shape[0]):
            spec = TensorSpec(place.shape, "float32" if place.wide else dtype)
            tensor = found.setdefault(place.tensor, ExportTensor(place.tensor, spec, []))
            tensor.parts.append((p.name, first, rows, place))
    return list(found.values())


def bands(source: ReadsWeights, tensor: ExportTensor, kind: str = "model") -> Iterator[np.ndarray]:
    """A tensor's elements in order, some rows at a time. kind: its weights, or one of the optimizer's moments."""
    rows, *columns = tensor.spec.shape
    width = columns[0] if columns else 1
    band = max(1, BAND // (width * tensor.spec.itemsize))
    for start in range(0, rows, band):
        stop = min(start + band, rows)
        values = np.empty((stop - start, width), numpy_dtype(tensor.spec.dtype))
        for name, first, count, place in tensor.parts:
            runs = list(place.held(*((0, width) if place.transposed else (start, stop)), count))
            if not runs:
                continue
            # One read for all of them: each reads whole blocks.
            top, bottom = min(row for row, *_ in runs), max(row + run for row, _, run, _ in runs)
            box = ((first + top, first + bottom), (start, stop) if place.transposed else (0, width))
            piece = Piece.whole(box[: len(tensor.spec.shape)])
            read = bits(source.read(f"{kind}/{name}", piece, tensor.spec.dtype)).reshape(bottom - top, -1)
            target = bits(values).T if place.transposed else bits(values)
            base = 0 if place.transposed else start
            for row, theirs, run, step in runs:
                target[theirs - base : theirs - base + (run - 1) * step + 1 : step] = read[row - top : row - top + run]
        yield values
