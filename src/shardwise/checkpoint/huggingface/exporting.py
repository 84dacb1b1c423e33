"""Writing a checkpoint's weights as a Hugging Face folder that `transformers` loads, one band of a tensor at a time.

The tokenizer comes along, and what the weights that training started from had beside it: chat template, special tokens,
generation settings. Of a tokenizer that the run has trained, the end of text ends answers.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwise.checkpoint.dtypes import bits, finite, numpy_dtype, raw
from shardwise.checkpoint.geometry import Piece
from shardwise.checkpoint.huggingface.companions import GENERATION, TOKENIZER, Companions, base_dtype, companions_of
from shardwise.checkpoint.huggingface.weights import INDEX, SINGLE
from shardwise.checkpoint.manifest import TensorSpec
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.resharding import model_of
from shardwise.checkpoint.writer import safetensors_header, sync_folder
from shardwise.errors import UserError
from shardwise.model.blueprint import ForeignSlice
from shardwise.model.config import ModelConfig
from shardwise.model.huggingface import to_huggingface
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


@dataclass(frozen=True)
class Exported:
    """Result of an export: the folder, its files, tensors, and the bytes of all tensors. nonfinite: tensors with an
    element that is not finite."""

    folder: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    nonfinite: tuple[str, ...] = ()
    dtype: str = "float32"


class OutputFolder:
    """A folder that files are written to: `files` are the ones made here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, list[str]()

    @classmethod
    @contextmanager
    def new(cls, folder: Path) -> "Iterator[OutputFolder]":
        """A folder that is new or empty; on an error nothing of it is left. Raises `UserError` when it is in use or
        cannot be written."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is not empty; nothing was overwritten: choose another folder")
        output = cls(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            yield output
            sync_folder(folder)
        except BaseException as error:
            output.remove()
            if isinstance(error, OSError):
                raise UserError(f"cannot write to {folder}: {error.strerror}") from None
            raise

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Make a file, complete on the disk when this returns. One that is there already is an `OSError`."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as file:
            self.files.append(name)
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write(name, [(json.dumps(content, indent=2) + "\n").encode()])

    def remove(self) -> None:
        for name in self.files:
            with suppress(OSError):
                (self.folder / name).unlink()
        for folder in {(self.folder / name).parent for name in self.files} - {self.folder}:
            with suppress(OSError):
                folder.rmdir()
        with suppress(OSError):
            self.folder.rmdir()


DTYPES = ("bfloat16", "float32", "float16")
"""dtypes of exported weights."""
MAX_SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in one file, as transformers writes them."""


def export(
    checkpoint: Checkpoint,
    folder: Path | str,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """Write a checkpoint's weights to a new folder: config.json, generation_config.json, and one safetensors file or
    several with an index.

    dtype: one of `DTYPES`, of every tensor but routers' biases; None for that of the weights that the run started from,
    else "bfloat16". max_shard_bytes: of tensors in one file; a
    larger tensor has one of its own. Raises `UserError` when no family of Hugging Face computes the model, the folder
    is in use or cannot be written, or the checkpoint is damaged; nothing of it is left.
    """
    model = model_of(checkpoint)
    if model.lora:
        raise UserError(f"{checkpoint.folder} has adapters alone: merge them into their weights (checkpoint merge)")
    return export_weights(
        checkpoint, model, Path(folder), dtype_of(checkpoint, dtype), companions(checkpoint), max_shard_bytes
    )


def export_weights(
    source: ReadsWeights,
    model: ModelConfig,
    folder: Path,
    dtype: str,
    companions: Companions | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Exported:
    """`export` of the weights of `model` from any source. companions: what is written beside them. Raises `UserError`
    as `export`."""
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if max_shard_bytes < 1:
        raise UserError(f"max_shard_bytes must be a positive integer, not {max_shard_bytes}")
    # Left out, they are the family's own in transformers: other tokens of this tokenizer.
    ids = companions.ids() if companions else {"bos_token_id": None, "eos_token_id": None}
    config = to_huggingface(model) | {"torch_dtype": dtype} | ids
    shards = _shards(export_tensors(model, dtype), max_shard_bytes)
    with OutputFolder.new(folder) as output:
        nonfinite = _write_shards(output, source, shards)
        files = companions.files() if companions else {}
        for name, contents in files.items():
            output.write(name, [contents])
        if GENERATION not in files:
            output.write_json(GENERATION, ids)
        output.write_json("config.json", config)
    return Exported(folder, tuple(output.files), sum(map(len, shards)), _nbytes(shards), nonfinite, dtype)


def dtype_of(checkpoint: Checkpoint, dtype: str | None) -> str:
    """dtype of an export: the requested one, else that of the weights that the run started from, else bfloat16."""
    started = isinstance(checkpoint.manifest.about.get("weights"), str)
    return dtype or (base_dtype(companions_of(checkpoint), DTYPES) if started else None) or DTYPES[0]


def companions(checkpoint: Checkpoint) -> Companions | None:
    """The tokenizer with which the run's text was made into tokens, if it is still there, and what was beside it."""
    if (folder := companions_of(checkpoint)) is not None:
        return Companions(folder / TOKENIZER, folder)
    corpus = checkpoint.manifest.about.get("corpus")
    path = Path(corpus, "tokenizer.json") if isinstance(corpus, str) and corpus else None
    try:
        return Companions(path) if path and path.is_file() else None
    except (OSError, ValueError):
        return None


def _shards(tensors: list[ExportTensor], limit: int) -> list[list[ExportTensor]]:
    shards: list[list[ExportTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.spec.nbytes
    return shards


def _nbytes(shards: list[list[ExportTensor]]) -> int:
    return sum(tensor.spec.nbytes for shard in shards for tensor in shard)


def _write_shards(output: OutputFolder, source: ReadsWeights, shards: list[list[ExportTensor]]) -> tuple[str, ...]:
    """Returns the tensors that are not finite."""
    count, nonfinite = len(shards), dict[str, None]()

    def contents(tensors: list[ExportTensor]) -> Iterator[bytes | memoryview]:
        yield safetensors_header({"format": "pt"}, [(tensor.name, tensor.spec) for tensor in tensors])
        for tensor in tensors:
            for band in bands(source, tensor):
                if not finite(band, tensor.spec.dtype):
                    nonfinite[tensor.name] = None
                yield raw(band)

    owners: dict[str, str] = {}
    for i, tensors in enumerate(shards):
        name = SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        output.write(name, contents(tensors))
        owners |= {tensor.name: name for tensor in tensors}
    if count > 1:
        content = {"metadata": {"total_size": _nbytes(shards)}, "weight_map": dict(sorted(owners.items()))}
        output.write_json(INDEX, content)
    return tuple(nonfinite)
