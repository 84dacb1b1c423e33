"""`torch.distributed.checkpoint` folders, as FSDP2 writes them: a pickled index, and files of saved tensors end to end.

A model's parameters and `get_optimizer_state_dict`'s entries (`state.<name>.exp_avg`), nested or flat, lie under
whatever keys the training script gave them. Without torch's planners: the index says in which bytes of which file each
chunk of each tensor lies.

A `torch.distributed.checkpoint` folder, by torch's own writer: FSDP2 and torchtitan load it on any number of ranks.

Keys are `model.<name>`, `optim.state.<name>.exp_avg`, `.exp_avg_sq` and `.step`, and `optim.param_groups`, as
`dcp.save({"model": ..., "optim": ...})` of `get_state_dict` has them.
"""

import math
import os
import re
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.dtypes import bits, numpy_dtype
from shardwise.checkpoint.file_io import opened
from shardwise.checkpoint.foreign.pickles import Inert, elements, load, load_metadata
from shardwise.checkpoint.foreign.state import (
    SETTINGS,
    ForeignState,
    ForeignTensor,
    WrittenState,
    WrittenTensor,
    distinct,
    dtype_name,
    number,
    one_step,
    quoted,
    settings,
    torch_for_writing,
)
from shardwise.checkpoint.geometry import Piece, full, tiles
from shardwise.data.extras import require
from shardwise.errors import UserError

_MOMENT = re.compile(r"(?P<stem>(?:.*\.)?state\.(?P<name>.+))\.(?P<field>\w+)", re.DOTALL)
_GROUP = re.compile(r"(?:.*\.)?param_groups\.(?P<group>.+)\.(?P<field>\w+)", re.DOTALL)
_FIELDS = {"exp_avg": "first", "exp_avg_sq": "second", "step": "step"}
_RANK_FILE = re.compile(r"__([0-9]{1,9})_[0-9]{1,9}\.distcp", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A box of a tensor, and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the index; shape None: any other object, in one chunk."""

    shape: tuple[int, ...] | None
    dtype: str
    chunks: tuple[_Chunk, ...]


def read(folder: Path, weights_only: bool = False) -> ForeignState:
    """The state in a folder.

    Raises `UserError` when its index is damaged, or its optimizer is asked for and not AdamW.
    """
    entries = _index(folder)
    state = ForeignState(folder, {"model": {}, "first": {}, "second": {}}, about={"format": "dcp"})
    steps: dict[str, Any] = {}
    for key, entry in entries.items():
        moment = _MOMENT.fullmatch(key)
        if moment is None:
            if entry.shape is not None:
                state.tensors["model"][key] = _tensor(folder, key, entry)
        elif not weights_only:
            _moment(state, steps, moment, key, entry)
    state.steps = one_step({key: _scalar(folder, key, entries[key]) for key in steps}, state.folder)
    state.groups = _groups(folder, entries)
    files = {chunk.path.name for entry in entries.values() for chunk in entry.chunks}
    ranks = {int(match[1]) for name in files if (match := _RANK_FILE.fullmatch(name))}
    state.about["ranks"] = max(ranks, default=0) + 1
    return state


def _moment(state: ForeignState, steps: dict[str, Any], moment: re.Match[str], key: str, entry: _Entry) -> None:
    kind = _FIELDS.get(moment["field"])
    if moment["name"].isdecimal():
        raise UserError(
            f"{state.folder} has its optimizer's state by number ({quoted(key)}): save what torch.distributed."
            "checkpoint.state_dict.get_optimizer_state_dict gives, or import with --weights-only"
        )
    if kind is None:
        raise UserError(f"{state.folder} has {quoted(key)}, which AdamW has not: import with --weights-only")
    if kind == "step":
        steps[key] = None
    elif entry.shape is not None:
        state.tensors[kind][moment["stem"]] = _tensor(state.folder, key, entry)


def _groups(folder: Path, entries: dict[str, _Entry]) -> list[dict[str, Any]]:
    """The settings of the parameter groups, whether they are stored whole, by number or by parameter."""
    found: dict[str, dict[str, Any]] = {}
    whole: list[Any] = []
    for key, entry in entries.items():
        if entry.shape is not None:
            continue
        if key.rpartition(".")[2] == "param_groups":
            content = _object(folder, key, entry)
            whole += content if isinstance(content, list) else []
        elif (match := _GROUP.fullmatch(key)) and match["field"] in SETTINGS:
            found.setdefault(match["group"], {})[match["field"]] = _object(folder, key, entry)
    return distinct([settings(group) for group in [*whole, *found.values()]])


# Reading.


def _tensor(folder: Path, key: str, entry: _Entry) -> ForeignTensor:
    assert entry.shape is not None
    where = f"{quoted(key)} of {folder}"
    return ForeignTensor(entry.shape, entry.dtype, math.prod(entry.shape), partial(_whole, entry, where), where)


def _whole(entry: _Entry, where: str) -> np.ndarray:
    assert entry.shape is not None
    dtype = dtype_name(entry.dtype, where)
    out = np.empty(entry.shape, numpy_dtype(dtype))
    for chunk in entry.chunks:
        tensor = load(_bytes(chunk, where), f"{where} in {chunk.path.name}")
        if tuple(getattr(tensor, "shape", ())) != chunk.sizes or str(getattr(tensor, "dtype", "")) != f"torch.{dtype}":
            raise UserError(f"{chunk.path} is damaged: it does not hold {where} as the index says")
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        bits(out)[box] = bits(elements(tensor, where)).reshape(chunk.sizes)
    return out.reshape(-1)


def _scalar(folder: Path, key: str, entry: _Entry) -> float:
    return number(_object(folder, key, entry), f"{quoted(key)} of {folder} is not a number")


def _object(folder: Path, key: str, entry: _Entry) -> Any:
    """Value of an entry with a single chunk: a number, a list, a tensor of one element."""
    where = f"{quoted(key)} of {folder}"
    if len(entry.chunks) != 1:
        raise UserError(f"{where} is in {len(entry.chunks)} pieces")
    return load(_bytes(entry.chunks[0], where), where)


def _bytes(chunk: _Chunk, where: str) -> bytes:
    with opened(chunk.path) as file:
        if chunk.start + chunk.length > os.fstat(file.fileno()).st_size:
            raise UserError(f"{chunk.path} is cut short: {where} is not whole")
        file.seek(chunk.start)
        return file.read(chunk.length)


# The index: every value is looked at before it is used, since it may come from anywhere.


def _index(folder: Path) -> dict[str, _Entry]:
    path = folder / ".metadata"
    if not path.exists():
        raise UserError(f"{folder} has no .metadata: it is no whole torch.distributed.checkpoint folder")
    metadata = load_metadata(path)
    tensors, storage = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(storage, dict):
        raise UserError(f"{path} is damaged: it has no list of tensors")
    places: dict[tuple[str, tuple[int, ...] | None], Inert] = {}
    for index, info in storage.items():
        if not isinstance(index, Inert) or not isinstance(info, Inert) or not isinstance(index.get("fqn"), str):
            raise UserError(f"{path} is damaged: it does not say where its tensors lie")
        offset = index.get("offset")
        places[index.get("fqn"), None if offset is None else _sizes(offset, path)] = info
    return {_key(key, path): _entry(folder, key, value, places) for key, value in tensors.items()}


def _entry(folder: Path, key: str, value: Any, places: dict[tuple[str, tuple[int, ...] | None], Inert]) -> _Entry:
    path = folder / ".metadata"
    what = f"{path}: {quoted(key)}"
    if type(value).__name__ == "BytesStorageMetadata":
        return _Entry(None, "", (_chunk(folder, what, (), (), places.get((key, None))),))
    if type(value).__name__ != "TensorStorageMetadata":
        raise UserError(f"{what} is neither a tensor nor an object")
    shape, properties = _sizes(value.get("size"), path), value.get("properties")
    dtype = properties.state[0] if isinstance(properties, Inert) and isinstance(properties.state, tuple) else None
    if not isinstance(dtype, str):
        raise UserError(f"{what} has no dtype")
    chunks = []
    for part in value.get("chunks") if isinstance(value.get("chunks"), list) else []:
        if not isinstance(part, Inert):
            raise UserError(f"{what} is in pieces of an unknown kind")
        offsets, sizes = _sizes(part.get("offsets"), path), _sizes(part.get("sizes"), path)
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise UserError(f"{what} has a piece of another rank than its shape {shape}")
        if math.prod(sizes) or not shape:
            info = places.get((key, offsets)) or places.get((key, offsets or None))
            chunks.append(_chunk(folder, what, offsets, sizes, info))
    if len(shape) <= 2 and not _tile(shape, chunks):
        raise UserError(f"{what}: its pieces do not hold each of its elements once")
    return _Entry(shape, dtype.removeprefix("torch."), tuple(chunks))


def _tile(shape: tuple[int, ...], chunks: list[_Chunk]) -> bool:
    """Whether chunks hold each element of a tensor of at most two dims once."""
    boxes = [tuple((o, o + n) for o, n in zip(c.offsets, c.sizes, strict=True)) for c in chunks]
    inside = all(b <= n for box in boxes for (_, b), n in zip(box, shape, strict=True))
    if not math.prod(shape):
        return not boxes
    return inside and (tiles(shape, [Piece.whole(box) for box in boxes]) if full(shape) else len(boxes) == 1)


def _chunk(folder: Path, what: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Inert | None) -> _Chunk:
    if info is None:
        raise UserError(f"{what}: the index does not say where it lies")
    name, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
    # A name and no path: the index must not make us read from anywhere else.
    if not isinstance(name, str) or not name.isprintable() or Path(name).name != name:
        raise UserError(f"{what} lies in {quoted(name)}, which is no file of this folder")
    if type(start) is not int or type(length) is not int or not (0 <= start < 1 << 62 and 0 <= length < 1 << 62):
        raise UserError(f"{what} lies at a place that no file has")
    if info.get("transform_descriptors"):
        raise UserError(f"{what} was written through a transform (such as compression), which is not read here")
    return _Chunk(offsets, sizes, folder / name, start, length)


def _key(value: Any, path: Path) -> str:
    if not isinstance(value, str):
        raise UserError(f"{path} is damaged: {quoted(value)} is no name of a tensor")
    return value


def _sizes(value: Any, path: Path) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and 0 <= n < 1 << 48 for n in value):
        raise UserError(f"{path} is damaged: {quoted(value)} is no size")
    return value


_WRITTEN_FIELDS = {"first": "exp_avg", "second": "exp_avg_sq"}


def write_dcp(state: WrittenState, folder: Path) -> None:
    """Write a state to an empty folder, one tensor in memory at a time."""
    torch = torch_for_writing()
    dcp = require("torch.distributed.checkpoint", "train", "writing other trainers' checkpoints")
    sources = {f"model.{tensor.name}": tensor for tensor in state.tensors["model"]}
    sources |= {f"model.{name}": sources[f"model.{first}"] for name, first in state.aliases.items()}
    for kind in state.kinds[1:]:
        sources |= {f"optim.state.{tensor.name}.{_WRITTEN_FIELDS[kind]}": tensor for tensor in state.tensors[kind]}
    tree: dict[str, Any] = {
        key: torch.empty(tensor.spec.shape, dtype=getattr(torch, tensor.spec.dtype), device="meta")
        for key, tensor in sources.items()
    }
    if state.kinds[1:]:
        # Keys as a nested state dict has them once it is flat.
        for name in state.decays:
            tree[f"optim.state.{name}.step"] = torch.tensor(float(state.updates))
        tree["optim.param_groups"] = state.groups()
    planner = _lazy_planner(dcp, sources)(flatten_state_dict=False)
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    try:
        with warnings.catch_warnings():
            # One process writes all of it, and torch warns of that.
            warnings.simplefilter("ignore")
            dcp.save(tree, storage_writer=writer, planner=planner, no_dist=True)
    except dcp.CheckpointException as error:
        # torch collects each rank's exception; there is one rank.
        ((reason, _),) = error.failures.values()
        raise reason from None


def _lazy_planner(dcp: Any, sources: dict[str, WrittenTensor]) -> Any:
    """A class of torch's planner that reads a tensor when it is written."""

    class LazyPlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
        def lookup_object(self, index: Any) -> Any:
            tensor = sources.get(index.fqn)
            return super().lookup_object(index) if tensor is None else tensor.load()

    return LazyPlanner
