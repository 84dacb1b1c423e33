"""Reading a checkpoint: any piece of any tensor, from the few blocks of the few files that hold it.

Whatever is read is checked: a block that does not match its checksum is never handed out.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

import numpy as np

from shardwise.checkpoint.dtypes import bits, convert, finite, numpy_dtype, raw
from shardwise.checkpoint.file_io import DamagedError, opened, read_exactly
from shardwise.checkpoint.geometry import Piece, copy, full, shared
from shardwise.checkpoint.manifest import BLOCK, Manifest, PartFile, StoredPiece, TensorSpec, trained
from shardwise.checkpoint.writer import check_files
from shardwise.errors import UserError
from shardwise.layout.optimizers import OPTIMIZERS


class Checkpoint:
    """A checkpoint on disk: `manifest` says what it holds, `read` gets it."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._held: dict[str, list[tuple[PartFile, StoredPiece]]] = {name: [] for name in manifest.tensors}
        for part in manifest.parts:
            for stored in part.pieces:
                self._held[stored.tensor].append((part, stored))
        self._checked: set[str] = set()

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """The checkpoint in a folder. Its manifest is checked in full, of its files only the lengths.

        Raises `UserError` when there is none, or it is damaged.
        """
        folder = Path(folder)
        manifest = Manifest.read(folder)
        check_files(folder, manifest)
        return cls(folder, manifest)

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        return self.manifest.tensors

    def unused_states(self, optimizer: str) -> tuple[str, ...]:
        """The stored moments that an optimizer does not have. Raises `UserError` where its own are missing."""
        kinds = {name.partition("/")[0] for name in self.tensors}
        if missing := [moment for moment in OPTIMIZERS[optimizer] if moment not in kinds]:
            raise UserError(
                f"{self.folder} lacks the {' and '.join(missing)} moments that {optimizer} needs: resume with the "
                "optimizer that wrote it, or start a new run from its weights (checkpoint export, train --weights)"
            )
        stored = dict.fromkeys(moment for moments in OPTIMIZERS.values() for moment in moments)
        return tuple(moment for moment in stored if moment in kinds and moment not in OPTIMIZERS[optimizer])

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `UserError` unless the checkpoint holds exactly these tensors (stored name -> shape)."""
        for name, shape in shapes.items():
            if name not in self.tensors:
                raise UserError(f"{self.folder} is of another model: it has no {name}")
            if self.tensors[name].shape != tuple(shape):
                raise UserError(
                    f"{self.folder} is of another model: its {name} has shape {self.tensors[name].shape}, not {shape}"
                )
        if extra := next((name for name in self.tensors if name not in shapes), None):
            raise UserError(f"{self.folder} is of another model: it has {extra}, which this one lacks")

    def read(
        self, tensor: str, piece: Piece | None = None, dtype: str | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """The elements of a piece (of all of the tensor, left out), as a vector in the piece's own order.

        dtype: torch's name of the one wanted, the stored one if left out; bfloat16 comes as `uint16`. out: where to
        put them, a contiguous vector; elements of the piece that lie outside the tensor, padding, are left as they are
        there (zero in a new array). Raises `UserError` naming the file when what is read is damaged.
        """
        if tensor not in self.tensors:
            raise UserError(f"{self.folder} has no tensor {tensor}")
        spec = self.tensors[tensor]
        piece = Piece.whole(full(spec.shape)) if piece is None else piece
        dtype = dtype or spec.dtype
        if out is None:
            out = np.zeros(piece.numel, numpy_dtype(dtype))
        assert out.dtype == numpy_dtype(dtype) and out.shape == (piece.numel,)
        for part, stored in self._held[tensor]:
            start, stop = stored.piece.reach(piece)
            if start < stop:
                for block, values in self._blocks(part, stored, start, stop, lambda of: bool(shared(piece, of))):
                    copy(bits(out), piece, bits(convert(values, spec.dtype, dtype)), block)
        return out

    def verify(self, progress: Callable[[int], object] = lambda done: None) -> tuple[str, ...]:
        """Read everything and check every checksum. `progress` is called with the bytes done so far. Returns the
        weights and optimizer state that have an element which is not finite.

        Raises `UserError` naming the first file that is damaged.
        """
        done, nonfinite = 0, set[str]()
        for part in self.manifest.parts:
            self._check_header(part)
            done += part.header
            for stored in part.pieces:
                for _, values in self._blocks(part, stored, 0, stored.piece.numel, lambda of: True):
                    if trained(stored.tensor) and not finite(values, self.tensors[stored.tensor].dtype):
                        nonfinite.add(stored.tensor)
                    done += values.nbytes
                    progress(done)
        return tuple(sorted(nonfinite))

    def _blocks(
        self, part: PartFile, stored: StoredPiece, start: int, stop: int, wanted: Callable[[Piece], bool]
    ) -> Iterator[tuple[Piece, np.ndarray]]:
        """(piece, elements) of the `wanted` blocks that meet elements [start, stop) of a stored piece.

        The array is valid until the next one is asked for.
        """
        self._check_header(part)
        dtype = numpy_dtype(self.tensors[stored.tensor].dtype)
        each = BLOCK // dtype.itemsize
        buffer = np.empty(min(each, stored.piece.numel), dtype)
        path = self.folder / part.name
        with opened(path) as file:
            for index in range(start // each, -(-stop // each)):
                block = stored.piece.part(index * each, (index + 1) * each)
                if not wanted(block):
                    continue
                values = buffer[: block.numel]
                data = raw(values)
                _read_exactly(file.fileno(), data, stored.offset + index * BLOCK, path)
                if zlib.crc32(data) != stored.crc32[index]:
                    raise DamagedError(f"{path} is damaged: the checksum of {stored.tensor} is wrong")
                yield block, values

    def _check_header(self, part: PartFile) -> None:
        if part.name in self._checked:
            return
        path = self.folder / part.name
        header = bytearray(part.header)
        with opened(path) as file:
            _read_exactly(file.fileno(), memoryview(header), 0, path)
        if zlib.crc32(header) != part.header_crc32:
            raise DamagedError(f"{path} is damaged: the checksum of its header is wrong")
        self._checked.add(part.name)


def _read_exactly(handle: int, data: memoryview, offset: int, path: Path) -> None:
    read_exactly(handle, data, offset, str(path), f"{path} is cut short: the checkpoint is damaged")
