"""Pieces of every parameter on a rank under a layout: those that it writes, and those that it needs to continue.

A rank's flat unit (`layout/units.py`) is cut by ZeRO into equal intervals, padded at the end; inside it lie the local
parameters end to end, each a box of its global tensor, perhaps with padding rows or columns. What one element is on
disk follows from both, and padding is never there.

Ranks that hold the same share the work: an interval that data ranks replicate is written by each of them in equal
parts; of tensor-parallel ranks that hold the same values, the first one writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from shardwise.checkpoint.geometry import Piece, copy
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, unit_plan
from shardwise.layout.axes import REPLICA
from shardwise.layout.placement import Placed
from shardwise.layout.units import Unit
from shardwise.model.parameters import Model


@dataclass(frozen=True)
class LocalInterval:
    """Elements [start, stop) of a unit's flat buffer: a run of one parameter's local elements, padding included.

    local: them as a piece of the local tensor's box, which reaches beyond the global tensor where it is padded.
    stored: the same without padding, as on disk; it may be empty. name, shape: of the global parameter.
    """

    unit: str
    start: int
    stop: int
    name: str
    shape: tuple[int, ...]
    local: Piece
    stored: Piece

    def without_padding(self, values: np.ndarray) -> np.ndarray:
        """The elements of `stored` out of those of `local` (a view where there is no padding among them)."""
        if self.stored.numel == self.local.numel:
            return values
        if self.local.box[1:] == self.stored.box[1:]:
            # Padding rows lie behind all others.
            return values[: self.stored.numel]
        out = np.empty(self.stored.numel, values.dtype)
        copy(out, self.stored, values, self.local)
        return out


def needs(model: Model, layout: Layout, rank: int, frozen: bool = False) -> tuple[LocalInterval, ...]:
    """All that `rank` must load: its ZeRO interval of every unit, which at stage 0 is the whole unit. frozen: of frozen
    parameters, which are in no checkpoint, in place of the trained ones."""
    plan, mesh = _plan(model, layout, rank)
    found: list[LocalInterval] = []
    for unit in (unit for unit in plan.units if unit.frozen == frozen):
        start = mesh.index(unit.shard, rank) * unit.shard_numel
        found += _held(unit, start, start + unit.shard_numel)
    return tuple(found)


def writes(model: Model, layout: Layout, rank: int) -> tuple[LocalInterval, ...]:
    """Pieces that `rank` writes: over all ranks, every element of every trained parameter once. The first replica
    writes."""
    plan, mesh = _plan(model, layout, rank)
    found: list[LocalInterval] = []
    if rank >= layout.training_ranks or mesh.index(REPLICA, rank):
        return ()
    for unit in (unit for unit in plan.units if not unit.frozen):
        share = -(-unit.shard_numel // mesh.size(unit.replicate))
        end = (mesh.index(unit.shard, rank) + 1) * unit.shard_numel
        start = mesh.index(unit.shard, rank) * unit.shard_numel + mesh.index(unit.replicate, rank) * share
        # Under a pipeline the last stage has a copy of a tied embedding, which the first one writes.
        runs = _held(
            unit, start, min(start + share, end),
            lambda p: p.parameter.part in plan.parts and plan.tp_rank % p.replicas == 0,
        )  # fmt: skip
        found += (held for held in runs if held.stored.numel)
    return tuple(found)


def _plan(model: Model, layout: Layout, rank: int) -> tuple[UnitPlan, Mesh]:
    return unit_plan(model, layout, Workload(), rank=rank), Mesh.of(layout, model)


def _held(
    unit: Unit, start: int, stop: int, wanted: Callable[[Placed], bool] = lambda p: True
) -> Iterator[LocalInterval]:
    """The runs of the `wanted` parameters within [start, stop) of the unit's flat buffer."""
    boxes = (
        (placed, offset + first, shape, box)
        for offset, placed in zip(unit.offsets, unit.placed, strict=True)
        for first, shape, box in placed.pieces
    )
    for placed, offset, shape, box in boxes:
        a, b = max(start, offset), min(stop, offset + prod(shape))
        if a < b and wanted(placed):
            padded = tuple((start, start + size) for (start, _), size in zip(box, shape, strict=True))
            local = Piece(padded, a - offset, b - offset)
            yield LocalInterval(unit.name, a, b, placed.name, placed.parameter.shape, local, local.inside(box))
