"""Writing a checkpoint: every rank its own part file, then one of them the manifest.

The order makes a kill harmless at any moment: part files are complete on the disk before the manifest that names them
appears, under names that no earlier checkpoint in the same folder uses; the manifest appears by a rename. A folder
without a manifest is no checkpoint.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Self

import numpy as np

from shardwise.checkpoint.dtypes import CODES, finite, numpy_dtype, raw
from shardwise.checkpoint.file_io import DamagedError, DirectFile, memory
from shardwise.checkpoint.geometry import Piece, full
from shardwise.checkpoint.manifest import (
    BLOCK,
    NAME,
    PART_NAME,
    Manifest,
    PartFile,
    PartRecord,
    StoredPiece,
    TensorSpec,
)
from shardwise.errors import os_errors


@dataclass(frozen=True, slots=True)
class PartEntry:
    """A piece that a rank will write. tensor: its stored name, such as `model/head.norm.weight`."""

    tensor: str
    spec: TensorSpec
    piece: Piece

    @property
    def nbytes(self) -> int:
        return self.piece.numel * self.spec.itemsize

    @property
    def key(self) -> str:
        """The name inside the file: the tensor's own when all of it is here."""
        if self.piece == Piece.whole(full(self.spec.shape)):
            return self.tensor
        box = ",".join(f"{start}:{stop}" for start, stop in self.piece.box)
        return f"{self.tensor}[{box}][{self.piece.first}:{self.piece.last}]"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape if self.key == self.tensor else (self.piece.numel,)


class PartWriter:
    """One part file, a valid safetensors file, written from its start to its end.

    Call `write` with the elements of all entries in order, in chunks that do not cross from one entry into the next,
    then `finish`. In a `with` block, an error or a missing `finish` removes the file. image: of these entries, when
    what is written is its `arrays`. Raises `UserError` when the folder cannot be written.
    """

    def __init__(self, folder: Path, rank: int, entries: Sequence[PartEntry], image: PartImage | None = None) -> None:
        self.entries = [entry for entry in entries if entry.piece.numel]
        header = image.header if image else _header(self.entries)
        self._left = iter(self.entries)
        self._entry: PartEntry | None = None
        self._at = 0
        self._sums: list[list[int]] = []
        self._nonfinite: set[str] = set()
        self._finished = False
        with _plainly(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.path, self._file = _create(folder, rank, image.memory if image else None)
        self._header, self._header_crc32 = len(header), zlib.crc32(header)
        try:
            self._put(memoryview(header))
        except BaseException:
            self.abandon()
            raise

    def write(self, values: np.ndarray) -> None:
        """The next elements of the entry at hand: a contiguous array of its dtype (`uint16` for bfloat16)."""
        if not values.size:
            return
        if self._entry is None or self._at == self._entry.nbytes:
            self._entry, self._at = next(self._left), 0
            self._sums.append([])
        assert values.dtype == numpy_dtype(self._entry.spec.dtype), (self._entry.tensor, values.dtype)
        assert values.flags.c_contiguous
        data = raw(values)
        assert self._at + len(data) <= self._entry.nbytes, f"a chunk crosses the end of {self._entry.key}"
        sums = self._sums[-1]
        while len(data):
            # Looking, summing and writing take turns on what the processor's cache still holds.
            block = data[: BLOCK - self._at % BLOCK]
            if not finite(np.frombuffer(block, values.dtype), self._entry.spec.dtype):
                self._nonfinite.add(self._entry.tensor)
            if self._at % BLOCK:
                sums[-1] = zlib.crc32(block, sums[-1])
            else:
                sums.append(zlib.crc32(block))
            self._put(block)
            self._at += len(block)
            data = data[len(block) :]

    def finish(self) -> PartRecord:
        """Wait until the file is on the disk, and tell what it holds."""
        complete = self._entry is None or self._at == self._entry.nbytes
        assert complete and next(self._left, None) is None, f"{self.path} lacks elements"
        with _plainly(self.path):
            size = self._file.finish()
        self._finished = True
        stored, at = [], self._header
        for entry, sums in zip(self.entries, self._sums, strict=True):
            stored.append(StoredPiece(entry.tensor, entry.piece, at, tuple(sums)))
            at += entry.nbytes
        part = PartFile(self.path.name, size, self._header, self._header_crc32, tuple(stored))
        specs = {entry.tensor: entry.spec for entry in self.entries}
        return PartRecord(part, specs, tuple(sorted(self._nonfinite)))

    def abandon(self) -> None:
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._finished:
            self.abandon()

    def _put(self, data: memoryview) -> None:
        with _plainly(self.path):
            self._file.write(data)


class PartImage:
    """A part file's bytes in memory: a copy of a rank's state that is written as it lies there.

    arrays: for each entry that is not empty, the contiguous vector of its elements, to be filled.
    """

    def __init__(self, entries: Sequence[PartEntry]) -> None:
        entries = [entry for entry in entries if entry.piece.numel]
        self.header = _header(entries)
        at = len(self.header)
        self.memory = memory(at + sum(entry.nbytes for entry in entries))
        self.memory[:at] = self.header
        self.arrays: list[np.ndarray] = []
        for entry in entries:
            self.arrays.append(np.frombuffer(self.memory, numpy_dtype(entry.spec.dtype), entry.piece.numel, at))
            at += entry.nbytes


def write_part(
    folder: Path, rank: int, entries: Sequence[PartEntry], arrays: Iterable[np.ndarray], image: PartImage | None = None
) -> PartRecord:
    """Write one rank's part: `arrays` are the elements of the entries in their order, taken one at a time.

    image: as in `PartWriter`. Returns the record for `Manifest.of`, once the file is on the disk. Raises `UserError`
    when it cannot be written; nothing is left of it then, and earlier checkpoints are untouched.
    """
    with PartWriter(folder, rank, entries, image) as writer:
        for array in arrays:
            writer.write(array)
        return writer.finish()


def commit(folder: Path, manifest: Manifest) -> None:
    """Make a checkpoint of a folder in which all parts have been written: its manifest (`Manifest.of`) appears, whole.

    Parts that an earlier attempt left in the folder are removed. Raises `UserError` when the manifest cannot be
    written, or the parts are not what it says.
    """
    check_files(folder, manifest)
    path, partial = folder / NAME, folder / f"{NAME}.partial"
    with _plainly(path):
        sync_folder(folder)
        try:
            with partial.open("wb") as file:
                file.write(manifest.to_bytes())
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        sync_folder(folder)
        sync_folder(folder.absolute().parent)
    known = {part.name for part in manifest.parts}
    with suppress(OSError):
        for other in folder.iterdir():
            if PART_NAME.fullmatch(other.name) and other.name not in known:
                other.unlink()


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise `DamagedError` naming the first part file that is missing or not as long as the manifest says."""
    for part in manifest.parts:
        path = folder / part.name
        with os_errors(f"read {path}"):
            size = path.stat().st_size if path.is_file() else -1
        if size < 0:
            raise DamagedError(f"{path} is missing: the checkpoint is not whole")
        if size != part.nbytes:
            raise DamagedError(f"{path} has {size} bytes, not {part.nbytes}: the checkpoint is damaged")


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _create(folder: Path, rank: int, image: mmap | None) -> tuple[Path, DirectFile]:
    """(path, open file) of a new part; a file that an earlier attempt left may belong to a checkpoint still."""
    attempt = 1
    while True:
        path = folder / (f"rank-{rank:05d}.{attempt}.safetensors" if attempt > 1 else f"rank-{rank:05d}.safetensors")
        try:
            return path, DirectFile(path, image)
        except FileExistsError:
            attempt += 1


def _header(entries: Sequence[PartEntry]) -> bytes:
    tensors = [(entry.key, TensorSpec(entry.shape, entry.spec.dtype)) for entry in entries]
    return safetensors_header({"format": "pt", "written_by": "shardwise"}, tensors)


def safetensors_header(metadata: dict[str, str], tensors: Sequence[tuple[str, TensorSpec]]) -> bytes:
    """Length and JSON header of a safetensors file, padded with spaces to a multiple of eight bytes. tensors: by
    name, in the order in which they follow the header."""
    content: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, spec in tensors:
        content[name] = {"dtype": CODES[spec.dtype], "shape": spec.shape, "data_offsets": (at, at := at + spec.nbytes)}
    assert len(content) == len(tensors) + 1, "a tensor is written twice"
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _plainly(path: Path) -> AbstractContextManager[None]:
    return os_errors(f"write checkpoint {path}", "; earlier checkpoints are untouched")
