"""A checkpoint as another layout would have written it, and two checkpoints against each other.

Both go through the tensors one band of elements at a time, so that neither holds more of a model in memory than a band
and its pieces, whatever the layouts: every byte is read once and written once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from shardwise.checkpoint.dtypes import bits, convert
from shardwise.checkpoint.folder import new_folder
from shardwise.checkpoint.geometry import Piece, copy, full
from shardwise.checkpoint.manifest import Manifest, PartRecord, TensorSpec
from shardwise.checkpoint.pieces import writes
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.writer import PartEntry, PartWriter, commit
from shardwise.errors import UserError
from shardwise.layout import Layout, check
from shardwise.model import ModelConfig
from shardwise.model.adapters import is_scale
from shardwise.model.parameters import Model, parameters

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
    model = model_of(source)
    check(layout, model)
    with new_folder(folder):
        return _resharded(source, folder, model, layout)


def _resharded(source: Checkpoint, folder: Path, model: ModelConfig, layout: Layout) -> Manifest:
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
        expected = shapes(model, sorted({name.partition("/")[0] for name in checkpoint.tensors}))
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise UserError(f"{checkpoint.folder} does not say which model it is of: {error}") from None
    checkpoint.require(expected)
    return model


def shapes(model: Model, kinds: Iterable[str], frozen: bool = False) -> dict[str, tuple[int, ...]]:
    """Stored name -> shape of every tensor that a checkpoint of `model` with these kinds holds: of parameters that are
    trained. frozen: of the others, which the weights hold that a run starts from. Scales of 8 bits are in neither."""
    held = [p for p in parameters(model) if p.frozen == frozen and not is_scale(p.name)]
    return {f"{kind}/{p.name}": p.shape for kind in kinds for p in held}


def _entries(source: Checkpoint, model: ModelConfig, layout: Layout, rank: int) -> list[PartEntry]:
    """Pieces that `rank` writes, in the order of the source's tensors."""
    pieces: dict[str, list[Piece]] = {}
    for held in writes(model, layout, rank):
        pieces.setdefault(held.name, []).append(held.stored)
    return [
        PartEntry(tensor, spec, piece)
        for tensor, spec in source.tensors.items()
        for piece in pieces.get(tensor.partition("/")[2], [])
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
                run = _run(piece, band)
                if run.numel:
                    writers[rank].write(_extract(run, band, values))
            del values
        return [writer.finish() for writer in writers.values()]


def _run(piece: Piece, band: Piece) -> Piece:
    """The part of `piece` that lies in a band, an interval of the whole tensor: it is one run of it."""
    inside = band.inside(piece.box)
    first = max(piece.first, inside.first)
    return Piece(piece.box, first, max(first, min(piece.last, inside.last)))


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
    """A tensor that two checkpoints do not have alike. what: in words; elements: how many differ; largest: the largest
    absolute difference (NaN where one has NaN and the other has not), both None where they cannot be compared."""

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
    alike = of_a.dtype == of_b.dtype
    count, largest = 0, 0.0
    for band in _cut(Piece.whole(full(of_a.shape)), TensorSpec(of_a.shape, "float64")):
        x, y = a.read(tensor, band), b.read(tensor, band)
        if alike:
            unlike = bits(x) != bits(y)
            x, y = x[unlike], y[unlike]
        apart = _apart(convert(x, of_a.dtype, "float64"), convert(y, of_b.dtype, "float64"))
        count += apart.size if alike else int(np.count_nonzero(apart))
        # np.fmax would lose a NaN, max() would depend on its place.
        largest = float(np.maximum(largest, apart.max(initial=0.0)))
    if not alike:
        return TensorDifference(tensor, f"dtype {of_a.dtype} and {of_b.dtype}", count, largest)
    return TensorDifference(tensor, "values", count, largest) if count else None


def _apart(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """|x - y|; equal values, infinities and NaNs among them, are 0 apart."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(x - y)
    apart[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
    return apart
