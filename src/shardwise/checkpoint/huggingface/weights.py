"""Reading a Hugging Face folder as if it were a checkpoint of ours with weights alone.

Names, shapes and lengths are checked when it is opened; elements are read when they are asked for, and only those.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from shardwise.checkpoint.dtypes import bits, convert, numpy_dtype
from shardwise.checkpoint.geometry import Piece, copy, full, shared
from shardwise.checkpoint.huggingface.tensor_file import FileTensor, tensors_of
from shardwise.checkpoint.manifest import TensorSpec
from shardwise.checkpoint.names import unwrapped_names
from shardwise.errors import UserError, near_path, os_errors
from shardwise.model import ModelConfig
from shardwise.model.blueprint import ForeignSlice
from shardwise.model.config import Experts
from shardwise.model.families import family_of
from shardwise.model.foreign import ForeignNames
from shardwise.model.huggingface import from_huggingface
from shardwise.model.parameters import blueprint, foreign_slices, parameters

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_MAY_DIFFER = {"name", "published_params", "dropout", "attention_dropout", "lora"}
"""Fields of a model that say nothing about what its weights mean."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A parameter in files: (first row, slice, tensor) of each part of its rows."""

    parts: tuple[tuple[int, ForeignSlice, FileTensor], ...]

    @property
    def file(self) -> FileTensor:
        return self.parts[0][2]

    @property
    def dtype(self) -> str:
        return max((file.spec.dtype for _, _, file in self.parts), key=lambda dtype: numpy_dtype(dtype).itemsize)


class HuggingFaceWeights:
    """The weights in a folder: `model` is what they are of, `read` gets them. Names are `model/<parameter>`."""

    def __init__(self, folder: Path, model: ModelConfig, stored: dict[str, _Stored], twin: FileTensor | None) -> None:
        self.folder, self.model = folder, model
        self._table = f"model/{blueprint(model).table.name}"
        self._stored = {f"model/{name}": each for name, each in stored.items()}
        self._shapes = {f"model/{p.name}": p.shape for p in parameters(model)}
        self._twin = twin

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """The weights in a folder with a config.json and safetensors files, one or several with an index.

        Raises `UserError` naming file and tensor when the model does not run here, and when a tensor is missing, not
        known, of another shape than the model's, or not whole.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"no such folder: {folder}{near_path(folder, folder=True)}")
        model = from_huggingface(folder)
        if reason := model.why_not_runnable():
            raise UserError(f"{folder}: {reason}")
        names = family_of(model).names
        assert names
        found = _with_trunk(unwrapped_names(_tensors(folder)), names)
        if model.layers > len(found):  # of which nobody could even list the parameters
            raise UserError(
                f"{_where(folder)} has {len(found):,} tensors, too few for the {model.layers:,} layers of the model of "
                "its config.json"
            )
        found = _per_expert(found, names, model)
        wanted = foreign_slices(model)
        twin = found.get(names.head) if model.tied else None
        if model.tied and names.embedding not in found and twin is not None:
            found[names.embedding], twin = twin, None
        stored, known = {}, {names.head} if model.tied else set()
        for p in parameters(model):
            parts = []
            for row, place in wanted[p.name].each(p.shape[0]):
                if place.tensor not in found:
                    raise UserError(f"{_where(folder)} lacks {place.tensor}, which the model of its config.json has")
                parts.append((row, place, checked(found[place.tensor], place.shape)))
                known.add(place.tensor)
            stored[p.name] = _Stored(tuple(parts))
        for name, tensor in found.items():
            if name not in known and not names.ignored.fullmatch(name):
                raise UserError(f"{tensor.path} has {tensor.name}, which the model of its config.json lacks")
        if twin is not None:
            checked(twin, wanted[blueprint(model).table.name].shape)
        return cls(folder, model, stored, twin)

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """Stored name -> the parameter's shape, and the dtype that it has in its file."""
        return {name: TensorSpec(self._shapes[name], each.dtype) for name, each in self._stored.items()}

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `UserError` unless these are exactly the tensors that are here (stored name -> shape)."""
        for name, shape in shapes.items():
            if name not in self._shapes:
                raise UserError(f"{self.folder} is of another model: it has no {name}")
            if self._shapes[name] != tuple(shape):
                file = self._stored[name].file
                raise UserError(
                    f"{file.path} is of another model: {file.name} gives {name} the shape {self._shapes[name]}, "
                    f"not {tuple(shape)}"
                )
        if extra := next((name for name in self._shapes if name not in shapes), None):
            file = self._stored[extra].file
            raise UserError(f"{file.path} is of another model: it has {file.name}, which this one lacks")

    def require_model(self, model: ModelConfig) -> None:
        """Raise `UserError` naming the first field in which `model` computes something else with these weights."""
        may_differ = _MAY_DIFFER | ({"max_positions"} if model.positions == "rope" else set())
        for field in fields(ModelConfig):
            ours, theirs = getattr(model, field.name), getattr(self.model, field.name)
            if isinstance(ours, Experts) and isinstance(theirs, Experts):
                ours, theirs = ours.without_training(), theirs.without_training()
            if field.name not in may_differ and ours != theirs:
                raise UserError(
                    f"{self.folder} is of another model than {model.name}: its {field.name} is {theirs}, not {ours}"
                )

    def read(
        self, tensor: str, piece: Piece | None = None, dtype: str | None = None, out: np.ndarray | None = None
    ) -> np.ndarray:
        """The elements of a piece of a parameter (of all of it, left out), as `Checkpoint.read` gives them.

        Raises `UserError` naming file and tensor when they cannot be read, and when the embedding and the head of a
        tied model, both of which may be stored, are not the same there.
        """
        if tensor not in self._stored:
            raise UserError(f"{self.folder} has no tensor {tensor}")
        stored, shape = self._stored[tensor], self._shapes[tensor]
        piece = Piece.whole(full(shape)) if piece is None else piece
        dtype = dtype or stored.dtype
        if out is None:
            out = np.zeros(piece.numel, numpy_dtype(dtype))
        assert out.dtype == numpy_dtype(dtype) and out.shape == (piece.numel,)
        read_parts(stored.parts, shape, piece, dtype, out)
        if self._twin is not None and tensor == self._table:
            other = out.copy()
            read_parts([(row, place, self._twin) for row, place, _ in stored.parts], shape, piece, dtype, other)
            if not np.array_equal(bits(out), bits(other)):
                raise UserError(
                    f"{self._twin.path}: {self._twin.name} differs from {stored.file.name}, but config.json says "
                    "that they are one: set tie_word_embeddings to false there"
                )
        return out


def open_weights(folder: Path | str, model: ModelConfig) -> HuggingFaceWeights:
    """The weights in a folder, for this model. Raises `UserError` as `HuggingFaceWeights.open`, and when the model of
    the folder's config.json is another one; dropout may differ, and the length that rotary positions allow."""
    weights = HuggingFaceWeights.open(folder)
    weights.require_model(model)
    return weights


def read_parts(
    parts: Sequence[tuple[int, ForeignSlice, FileTensor]], shape: tuple[int, ...], piece: Piece, dtype: str,
    out: np.ndarray,
) -> None:  # fmt: skip
    """Copy what `piece` has of a parameter from its tensors to `out`."""
    rows = shape[0] // len(parts)
    for a, b, c, d in shared(piece, Piece.whole(full(shape))):
        if len(shape) == 1:
            a, b, c, d = c, d, 0, 1
        for top, place, file in parts[a // rows : -(-b // rows)]:
            for row, theirs, count, step in place.runs(max(a - top, 0), min(b - top, rows)):
                _read_run(place, file, (top + row, theirs, count, step), (c, d), (shape, piece, dtype, out))


def _read_run(
    place: ForeignSlice, file: FileTensor, run: tuple[int, int, int, int], columns: tuple[int, int],
    to: tuple[tuple[int, ...], Piece, str, np.ndarray],
) -> None:  # fmt: skip
    """Copy a run of rows. to: the parameter's shape, the piece of it in `out`, its dtype, and `out`."""
    (row, theirs, count, step), (c, d), (shape, piece, dtype, out) = run, columns, to
    end = theirs + (count - 1) * step + 1
    for first, matrix in file.bands(*((c, d, theirs, end) if place.transposed else (theirs, end, c, d))):
        if place.transposed:
            values, box = matrix[:, ::step].T, ((row, row + count), (first, first + len(matrix)))
        else:
            skipped = (theirs - first) % step
            at = row + (first + skipped - theirs) // step
            values = matrix[skipped::step]
            box = ((at, at + len(values)), (c, d))
        values = convert(np.ascontiguousarray(values).reshape(-1), file.spec.dtype, dtype)
        copy(bits(out), piece, bits(values), Piece.whole(box[: len(shape)]))


def _tensors(folder: Path) -> dict[str, FileTensor]:
    if (folder / SINGLE).exists():
        return tensors_of(folder / SINGLE)
    path = folder / INDEX
    with os_errors(f"read {path}"):
        try:
            content: Any = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise UserError(
                f"{folder} has neither {SINGLE} nor {INDEX}; save the model with transformers' save_pretrained"
            ) from None
        except (ValueError, RecursionError):
            raise UserError(f"{path} is not valid JSON") from None
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(map(_is_name, listed.values())):
        raise UserError(f"{path} has no weight_map from tensors to files beside it")
    files = {name: tensors_of(folder / name) for name in dict.fromkeys(listed.values())}
    for tensor, name in listed.items():
        if tensor not in files[name]:
            raise UserError(f"{folder / name} lacks {tensor}, which {path} says it has")
    return {tensor: files[name][tensor] for tensor, name in listed.items()}


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and Path(value).name == value != ""


def _with_trunk(found: dict[str, FileTensor], names: ForeignNames) -> dict[str, FileTensor]:
    """Entries by the names of the whole model: a base model's lack the prefix of all but the head."""
    if names.embedding in found or names.embedding.removeprefix(names.trunk) not in found:
        return found
    return {name if name == names.head else names.trunk + name: tensor for name, tensor in found.items()}


def _per_expert(found: dict[str, FileTensor], names: ForeignNames, model: ModelConfig) -> dict[str, FileTensor]:
    """Entries by the names of the family's files, where transformers stored them as it has them in memory: the weights
    of all experts of a block in one tensor."""
    entries: dict[str, FileTensor] = {}
    for name, tensor in found.items():
        block, _, inside = name.removeprefix(names.layers).partition(".")
        parts = names.stacked.get(inside, ()) if name.startswith(names.layers) else ()
        if not parts:
            entries[name] = tensor
        for i, part in enumerate(parts):
            theirs = f"{names.layers}{block}.{part}"
            if "{expert}" not in part:
                entries[theirs] = tensor
            elif model.experts:
                matrices = _matrices(tensor, model.experts.count, i, len(parts))
                entries |= {theirs.replace("{expert}", str(e)): matrix for e, matrix in enumerate(matrices)}
    return entries


def _matrices(tensor: FileTensor, experts: int, i: int, of: int) -> Iterator[FileTensor]:
    """Of every expert's matrix in a tensor [experts, rows, columns], the i-th of so many equal blocks of rows."""
    shape, itemsize = tensor.spec.shape, numpy_dtype(checked(tensor, tensor.spec.shape).spec.dtype).itemsize
    if len(shape) != 3 or shape[0] != experts or shape[1] % of or not tensor.spec.numel:
        raise UserError(f"{tensor.path}: {tensor.name} has shape {shape}, not a matrix for each of {experts} experts")
    spec = TensorSpec((shape[1] // of, shape[2]), tensor.spec.dtype)
    for expert in range(experts):
        yield FileTensor(tensor.path, tensor.name, spec, tensor.offset + (expert * of + i) * spec.numel * itemsize)


def checked(tensor: FileTensor, shape: tuple[int, ...]) -> FileTensor:
    """The tensor. Raises `UserError` when it has another shape, or a dtype that is not read here."""
    if tensor.spec.shape != shape:
        raise UserError(f"{tensor.path}: {tensor.name} has shape {tensor.spec.shape}, not the model's {shape}")
    try:
        numpy_dtype(tensor.spec.dtype)
    except UserError:
        raise UserError(f"{tensor.path}: {tensor.name} has dtype {tensor.spec.dtype}, which is not read here") from None
    return tensor


def _where(folder: Path) -> Path:
    return folder / (SINGLE if (folder / SINGLE).exists() else INDEX)
