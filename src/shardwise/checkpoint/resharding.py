"""A checkpoint as another layout would have written it, and two checkpoints against each other.

Both go through the tensors one band of elements at a time, so that neither holds more of a model in memory than a band
and its pieces, whatever the layouts: every byte is read once and written once.

Pieces of every parameter on a rank under a layout: to write, and to read in order to continue.

A rank's flat unit (`layout/unit.py`) is cut by ZeRO into equal intervals, padded at the end; inside it lie the local
parameters end to end, each a box of its global tensor, perhaps with padding rows or columns. What one element is on
disk follows from both, and padding is never there.

Ranks that hold the same share the work: an interval that data ranks replicate is written by each of them in equal
parts; of tensor-parallel ranks that hold the same values, the first one writes them.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeVar

import numpy as np

from shardwise.checkpoint.dtypes import bits, convert
from shardwise.checkpoint.folder import new_folder
from shardwise.checkpoint.geometry import Piece, copy, full
from shardwise.checkpoint.manifest import Manifest, PartRecord, TensorSpec
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.writer import PartEntry, PartWriter, commit
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, check, unit_plan
from shardwise.layout.axes import REPLICA
from shardwise.layout.placement import Placed
from shardwise.layout.unit import Unit
from shardwise.model import ModelConfig
from shardwise.model.adapters import is_scale
from shardwise.model.blueprint import Blueprint
from shardwise.model.parameters import Model, parameters

WHOLE_KINDS = ("buffer/", "missed/")
"""Beginnings of the names of stored tensors that are no parameter's (runtime/module/buffers.py)."""


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
        start = mesh.index(unit.sharded_over, rank) * unit.shard_numel
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
        end = (mesh.index(unit.sharded_over, rank) + 1) * unit.shard_numel
        start = mesh.index(unit.sharded_over, rank) * unit.shard_numel + mesh.index(unit.replicate, rank) * share
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


BAND = 16 << 20
"""Bytes of a tensor that are in memory at once; a few such bands are, while one is read and another written."""

OPEN_FILES = 256
"""Parts written at a time: every process may open 1,024 files."""

T = TypeVar("T")


def reshard(source: Checkpoint, folder: Path, layout: Layout) -> Manifest:
    """Write `source` to a new folder as `layout` would have. Returns the new manifest.

    Raises `UserError` when the layout does not suit the model, the folder is in use or cannot be written, or the source
    is damaged; no checkpoint is left in `folder` then.
    """
    model = subject_of(source)
    if isinstance(model, ModelConfig):
        check(layout, model)
    with new_folder(folder):
        return _resharded(source, folder, model, layout)


def _resharded(source: Checkpoint, folder: Path, model: Model, layout: Layout) -> Manifest:
    entries = [_entries(source, model, layout, rank) for rank in range(layout.ranks)]
    records: list[PartRecord] = []
    for first in range(0, layout.ranks, OPEN_FILES):
        ranks = range(first, min(first + OPEN_FILES, layout.ranks))
        records += _write_ranks(source, folder, {rank: entries[rank] for rank in ranks})
    old = source.manifest
    manifest = Manifest.of(
        records, step=old.step, samples=old.samples, seed=old.seed, optimizer_steps=old.optimizer_steps,
        about={**old.about, "layout": str(layout)},
    )  # fmt: skip
    commit(folder, manifest)
    return manifest


def model_of(checkpoint: Checkpoint) -> ModelConfig:
    """The model whose state a checkpoint is. Raises `UserError` when it does not say, or is not that model's."""
    about, count = checkpoint.manifest.about.get("model"), len(checkpoint.tensors)
    try:
        model = ModelConfig.from_json(about if isinstance(about, dict) else {})
        if model.layers > count or (model.experts and model.experts.count > count):
            raise UserError(f"it has {count} tensors, fewer than the model that it names")
        subject = _parts_of(checkpoint) or model
        kinds = sorted({name.partition("/")[0] for name in checkpoint.tensors if not _is_whole(name)})
        whole = {name: spec.shape for name, spec in checkpoint.tensors.items() if _is_whole(name)}
        expected = shapes(subject, kinds) | whole
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise UserError(f"{checkpoint.folder} does not say which model it is of: {error}") from None
    checkpoint.require(expected)
    return model


def subject_of(checkpoint: Checkpoint) -> Model:
    """`model_of`; of a model by its class of transformers, its parts as they were trained. Raises `UserError`."""
    model = model_of(checkpoint)
    return _parts_of(checkpoint) or model


def _parts_of(checkpoint: Checkpoint) -> Blueprint | None:
    parts = checkpoint.manifest.about.get("blueprint")
    return None if parts is None else Blueprint.from_json(parts)


def _is_whole(name: str) -> bool:
    """Whether a stored tensor is no parameter's, and one rank writes all of it."""
    return name.startswith(WHOLE_KINDS)


def shapes(model: Model, kinds: Iterable[str], frozen: bool = False) -> dict[str, tuple[int, ...]]:
    """Stored name -> shape of every tensor that a checkpoint of `model` with these kinds holds: of parameters that are
    trained. frozen: of the others, which are in the weights that a run starts from. Scales of bases are in neither."""
    held = [p for p in parameters(model) if p.frozen == frozen and not is_scale(p.name)]
    return {f"{kind}/{p.name}": p.shape for kind in kinds for p in held}


def _entries(source: Checkpoint, model: Model, layout: Layout, rank: int) -> list[PartEntry]:
    """Pieces that `rank` writes, in the order of the source's tensors."""
    pieces: dict[str, list[Piece]] = {}
    for held in writes(model, layout, rank):
        pieces.setdefault(held.name, []).append(held.stored)
    return [
        PartEntry(tensor, spec, piece)
        for tensor, spec in source.tensors.items()
        for piece in (
            [Piece.whole(full(spec.shape))] * (rank == 0)
            if _is_whole(tensor)
            else pieces.get(tensor.partition("/")[2], [])
        )
    ]


def _write_ranks(source: Checkpoint, folder: Path, entries: dict[int, list[PartEntry]]) -> list[PartRecord]:
    """Write the parts of some ranks side by side: each is in the order of the tensors, and of their elements."""
    pieces: dict[str, list[tuple[int, Piece]]] = {}
    for rank, own in entries.items():
        for entry in own:
            pieces.setdefault(entry.tensor, []).append((rank, entry.piece))
    with ExitStack() as stack:
        writers = {rank: stack.enter_context(PartWriter(folder, rank, own)) for rank, own in entries.items()}
        for tensor, band, values in stack.enter_context(
            closing(_ahead(_bands(source, [t for t in source.tensors if t in pieces])))
        ):
            for rank, piece in pieces[tensor]:
                # the part of `piece` inside a band, an interval of the whole tensor: it is one run of it
                inside = band.inside(piece.box)
                first = max(piece.first, inside.first)
                run = Piece(piece.box, first, max(first, min(piece.last, inside.last)))
                if run.numel:
                    writers[rank].write(_extract(run, band, values))
            del values
        return [writer.finish() for writer in writers.values()]


def _extract(run: Piece, band: Piece, values: np.ndarray) -> np.ndarray:
    if run.box == band.box:
        return values[run.first - band.first : run.last - band.first]
    out = np.empty(run.numel, values.dtype)
    copy(bits(out), run, bits(values), band)
    return out


def _bands(source: Checkpoint, tensors: list[str]) -> Iterator[tuple[str, Piece, np.ndarray]]:
    """(tensor, band, its elements) for all of each tensor in turn."""
    for tensor in tensors:
        spec = source.tensors[tensor]
        whole = Piece.whole(full(spec.shape))
        for band in _cut(whole, spec):
            yield tensor, band, source.read(tensor, band)


def _cut(whole: Piece, spec: TensorSpec) -> Iterator[Piece]:
    each = BAND // spec.itemsize
    for start in range(0, whole.numel, each):
        yield whole.part(start, start + each)


def _ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """The items, each made by a thread while the one before it is in use."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(next, items, None)
        while (item := pending.result()) is not None:
            pending = pool.submit(next, items, None)
            yield item
            del item  # or it would outlive its use


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that two checkpoints do not have in common. what: in words; elements: how many differ; largest: the
    largest absolute difference (NaN where one has NaN and the other has not), both None where they cannot be
    compared."""

    tensor: str
    what: str
    elements: int | None = None
    largest: float | None = None


def diff(a: Checkpoint, b: Checkpoint) -> list[TensorDifference]:
    """The tensors in which two checkpoints differ, bit by bit; files and layouts do not count."""
    found = []
    for tensor in sorted({*a.tensors, *b.tensors}):
        if tensor not in a.tensors or tensor not in b.tensors:
            found.append(TensorDifference(tensor, f"only in {(a if tensor in a.tensors else b).folder}"))
        elif a.tensors[tensor].shape != b.tensors[tensor].shape:
            found.append(TensorDifference(tensor, f"shape {a.tensors[tensor].shape} and {b.tensors[tensor].shape}"))
        elif difference := _compare(a, b, tensor):
            found.append(difference)
    return found


def _compare(a: Checkpoint, b: Checkpoint, tensor: str) -> TensorDifference | None:
    of_a, of_b = a.tensors[tensor], b.tensors[tensor]
    same_dtype = of_a.dtype == of_b.dtype
    count, largest = 0, 0.0
    for band in _cut(Piece.whole(full(of_a.shape)), TensorSpec(of_a.shape, "float64")):
        x, y = a.read(tensor, band), b.read(tensor, band)
        if same_dtype:
            unlike = bits(x) != bits(y)
            x, y = x[unlike], y[unlike]
        apart = _apart(convert(x, of_a.dtype, "float64"), convert(y, of_b.dtype, "float64"))
        count += apart.size if same_dtype else int(np.count_nonzero(apart))
        # np.fmax would lose a NaN, max() would depend on its place.
        largest = float(np.maximum(largest, apart.max(initial=0.0)))
    if not same_dtype:
        return TensorDifference(tensor, f"dtype {of_a.dtype} and {of_b.dtype}", count, largest)
    return TensorDifference(tensor, "values", count, largest) if count else None


def _apart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x - y|; equal values, infinities and NaNs among them, are 0 apart."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(x - y)
    apart[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
    return apart
