"""DeepSpeed's checkpoints of a data-parallel run: ZeRO-1, 2 and 3 as they are saved, and `ds_to_universal`'s folders.

Up to stage 2 a rank holds an interval of each parameter group laid end to end, and `param_slice_mappings` says where in
it each parameter lies. At stage 3 a rank holds its share of every parameter, padded to be equal, one after another in
the order of `param_shapes`, cut into sub-groups. A universal folder has one file for each parameter and moment.
Written against files that DeepSpeed 0.19.8 wrote.
"""

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.foreign.pickles import Inert, elements, load
from shardwise.checkpoint.foreign.state import (
    ForeignState,
    ForeignTensor,
    dtype_name,
    number,
    one_step,
    quoted,
    settings,
)
from shardwise.errors import UserError

_OPTIMIZER = re.compile(r"(bf16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{2,6})_optim_states\.pt", re.ASCII)
_NAMES = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
}
"""Stand-ins for classes that these files name beside tensors and containers."""

_MOMENTS = {"exp_avg": "first", "exp_avg_sq": "second"}
_FILES = {"fp32": "model", **_MOMENTS}


def is_one(folder: Path) -> bool:
    found = _tagged(folder)
    return (found / "zero").is_dir() or any(found.glob("*_optim_states.pt")) or any(found.glob("*_model_states.pt"))


def read(folder: Path, weights_only: bool = False) -> ForeignState:
    """The state in a folder, or in the one that its `latest` names.

    Raises `UserError` when it is damaged, split over tensor or pipeline ranks, or of another optimizer than AdamW.
    """
    folder = _tagged(folder)
    if (folder / "zero").is_dir():
        return _universal(folder, weights_only)
    return _zero(folder, weights_only)


def _tagged(folder: Path) -> Path:
    """`save_checkpoint` makes a folder for each tag, and writes the newest one's name beside them."""
    for name in ("latest", "latest_universal"):
        try:
            tag = (folder / name).read_text().strip() if (folder / name).stat().st_size < 1000 else ""
        except (OSError, ValueError):
            continue
        if tag and Path(tag).name == tag and (folder / tag).is_dir():
            return folder / tag
    return folder


# ZeRO: one file of optimizer state a rank.


@dataclass(frozen=True, slots=True)
class _Part:
    """State of one rank. groups: kind -> its flat vectors. slices: for each of them, name -> (start, count)."""

    path: Path
    stage: int
    partitions: int
    groups: dict[str, list[Any]]
    steps: dict[str, Any]
    slices: list[dict[str, tuple[int, int]]]
    settings: list[dict[str, Any]]


def _zero(folder: Path, weights_only: bool) -> ForeignState:
    files = _rank_files(folder)
    model_path = folder / "mp_rank_00_model_states.pt"
    if not model_path.exists():
        model_path = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    model = _file(model_path)
    shapes = _shapes(model, model_path)
    parts = [_part(path, weights_only) for path in files]
    stage = parts[0].stage
    for part in parts:
        if part.partitions != len(parts) or part.stage != stage:
            raise UserError(f"{part.path} is one of {part.partitions} ranks, but {folder} has {len(parts)}")
    cut = _by_shape if stage == 3 else _by_slices
    spans = cut(shapes, parts)
    tensors: dict[str, dict[str, ForeignTensor]] = {kind: {} for kind in parts[0].groups}
    for kind in tensors:
        vectors = [part.groups[kind] for part in parts]
        dtype = dtype_name(vectors[0][0].dtype, str(parts[0].path))
        for name, shape in shapes.items():
            where = f"{quoted(name)} of {folder}"
            numel = math.prod(shape)
            tensors[kind][name] = ForeignTensor(
                shape, dtype, numel, partial(_gather, vectors, spans[name], numel, dtype, where), where
            )
    steps = {f"{name} of {part.path.name}": value for part in parts for name, value in part.steps.items()}
    return ForeignState(
        folder, tensors, one_step(steps, folder), samples=_count(model, "global_samples"), batch=_batch(model),
        groups=parts[0].settings,
        about={"format": "deepspeed", "zero": stage, "ranks": len(parts), "version": str(model.get("ds_version"))[:40]},
    )  # fmt: skip


def _rank_files(folder: Path) -> list[Path]:
    """The optimizer files by rank. Raises `UserError` unless they are those of ranks 0, 1, ... of one model rank."""
    found: dict[int, Path] = {}
    for path in folder.glob("*_optim_states.pt"):
        match = _OPTIMIZER.fullmatch(path.name)
        if match is None:
            raise UserError(f"{path} is no file of a ZeRO checkpoint that is read here")
        if int(match[3]):
            raise UserError(
                f"{folder} is split over tensor- or pipeline-parallel ranks ({path.name}), which is not read here; "
                "DeepSpeed's ds_to_universal makes a folder that is"
            )
        found[int(match[2])] = path
    if not found:
        raise UserError(f"{folder} has no *_optim_states.pt: it is no ZeRO checkpoint, or only rank 0 saved it")
    if missing := sorted({*range(max(found) + 1)} - {*found}):
        raise UserError(f"{folder} lacks the optimizer state of rank {missing[0]}: every rank must save")
    return [found[rank] for rank in sorted(found)]


def _shapes(model: dict[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    """Parameter -> shape, in the order in which stage 3 lays them out."""
    if frozen := model.get("frozen_param_shapes"):
        raise UserError(f"{path} has frozen parameters, such as {quoted(next(iter(frozen)))}: none can be here")
    listed = model.get("param_shapes")
    shapes: dict[str, tuple[int, ...]] = {}
    for group in listed if isinstance(listed, list) else [listed]:
        for name, shape in _dict(group, f"param_shapes of {path}").items():
            if not isinstance(name, str) or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
                raise UserError(f"{path} is damaged: {quoted(name)} has no shape")
            shapes[name] = tuple(shape)
    return shapes


def _part(path: Path, weights_only: bool) -> _Part:
    where = str(path)
    state = _dict(_file(path).get("optimizer_state_dict"), where)
    stage, partitions = state.get("zero_stage"), state.get("partition_count")
    if type(stage) is not int or not 1 <= stage <= 3:
        raise UserError(f"{path} is of ZeRO stage {stage!r}, which is not read here")
    vectors = state.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(vectors, list) or not vectors or not all(map(_is_vector, vectors)):
        raise UserError(f"{path} has no weights of each group of parameters")
    # Up to stage 2 every group has its own, and they differ with experts alone.
    counts = set(partitions) if isinstance(partitions, list) else {partitions}
    if len(counts) != 1 or type(partition := counts.pop()) is not int:
        raise UserError(f"{path} does not say among how many ranks it is split")
    groups: dict[str, list[Any]] = {"model": vectors}
    steps: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    if not weights_only:
        adam = _dict(state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state"), where)
        moments, steps = _moments(adam.get("state"), path, vectors)
        groups |= moments
        found = [settings(group) for group in adam.get("param_groups") or []]
    slices = [] if stage == 3 else _slices(state, path, [vector.numel() for vector in vectors])
    return _Part(path, stage, int(partition), groups, steps, slices, found)


def _is_vector(value: Any) -> bool:
    return hasattr(value, "numel") and value.ndim == 1


def _moments(state: Any, path: Path, vectors: list[Any]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """(kind -> the flat vectors of each group, group -> step)."""
    state = _dict(state, f"AdamW's state in {path}")
    if sorted(state, key=str) != sorted(range(len(vectors)), key=str):
        raise UserError(f"{path} does not hold AdamW's state for each group of parameters")
    groups: dict[str, list[Any]] = {kind: [] for kind in _MOMENTS.values()}
    steps = {}
    for index, vector in enumerate(vectors):
        entry = _dict(state[index], f"AdamW's state in {path}")
        if extra := set(entry) - {"step", *_MOMENTS}:
            raise UserError(f"{path} has {quoted(min(map(str, extra)))}, which AdamW has not")
        for name, kind in _MOMENTS.items():
            held: Any = entry.get(name)
            if not _is_vector(held) or held.numel() != vector.numel():
                raise UserError(f"{path} is damaged: {name} of group {index} is not as long as its weights")
            groups[kind].append(held)
        steps[f"group {index}"] = _number(entry.get("step"), path)
    return groups, steps


def _slices(state: dict[str, Any], path: Path, lengths: list[int]) -> list[dict[str, tuple[int, int]]]:
    mappings = state.get("param_slice_mappings")
    if not isinstance(mappings, list) or len(mappings) != len(lengths):
        raise UserError(f"{path} has no param_slice_mappings: an older DeepSpeed wrote it, which is not read here")
    found = []
    for mapping, length in zip(mappings, lengths, strict=True):
        pieces = {}
        for name, address in _dict(mapping, f"param_slice_mappings of {path}").items():
            start, count = (address.get("start"), address.get("numel")) if isinstance(address, Inert) else (None, None)
            if type(start) is not int or type(count) is not int or not 0 <= start <= start + count <= length:
                raise UserError(f"{path} is damaged: {quoted(name)} lies outside of what this rank holds")
            pieces[name] = (start, count)
        found.append(pieces)
    return found


Span = tuple[int, int, int, int]
"""(rank, group, first, last): elements of a rank's flat vector. Those of a parameter follow each other in order."""


def _by_slices(shapes: dict[str, tuple[int, ...]], parts: list[_Part]) -> dict[str, list[Span]]:
    spans: dict[str, list[Span]] = {name: [] for name in shapes}
    for rank, part in enumerate(parts):
        for group, pieces in enumerate(part.slices):
            for name, (start, count) in pieces.items():
                if name not in spans:
                    raise UserError(f"{part.path} has {quoted(name)}, of which the model's file knows no shape")
                spans[name].append((rank, group, start, start + count))
    for name, shape in shapes.items():
        have = sum(last - first for _, _, first, last in spans[name])
        if have != math.prod(shape):
            raise UserError(f"{parts[0].path.parent}: {quoted(name)} has {have} elements, its shape is {shape}")
    return spans


def _by_shape(shapes: dict[str, tuple[int, ...]], parts: list[_Part]) -> dict[str, list[Span]]:
    lengths = [vector.numel() for vector in parts[0].groups["model"]]
    for part in parts:
        if [vector.numel() for vector in part.groups["model"]] != lengths:
            raise UserError(f"{part.path} holds other lengths than {parts[0].path}")
    share = {name: -(-math.prod(shape) // len(parts)) for name, shape in shapes.items()}
    if sum(share.values()) != sum(lengths):
        raise UserError(
            f"{parts[0].path} holds {sum(lengths)} elements, but a share of every parameter is {sum(share.values())}"
        )
    spans: dict[str, list[Span]] = {}
    at = 0
    for name, count in share.items():
        own = _within(lengths, at, at + count)
        spans[name] = [(rank, *run) for rank in range(len(parts)) for run in own]
        at += count
    return spans


def _within(lengths: list[int], first: int, last: int) -> list[tuple[int, int, int]]:
    """(group, first, last) of the elements [first, last) of all groups end to end."""
    found, start = [], 0
    for group, length in enumerate(lengths):
        a, b = max(first, start), min(last, start + length)
        if a < b:
            found.append((group, a - start, b - start))
        start += length
    return found


def _gather(vectors: list[list[Any]], spans: list[Span], numel: int, dtype: str, where: str) -> np.ndarray:
    """A parameter's elements from those of every rank; padding lies behind them."""
    pieces = []
    for rank, group, first, last in spans:
        vector = vectors[rank][group]
        if dtype_name(vector.dtype, where) != dtype:
            raise UserError(f"{where} has elements of {dtype} on one rank and {vector.dtype} on another")
        pieces.append(elements(vector[first:last], where))
    return np.concatenate(pieces)[:numel] if pieces else np.empty(0, np.float32)


# Universal: one folder a parameter.


def _universal(folder: Path, weights_only: bool) -> ForeignState:
    tensors: dict[str, dict[str, ForeignTensor]] = {kind: {} for kind in _FILES.values()}
    files = {"fp32": "model"} if weights_only else _FILES
    steps: dict[str, Any] = {}
    for path in sorted(path for path in (folder / "zero").iterdir() if path.is_dir()):
        for file, kind in files.items():
            if not (path / f"{file}.pt").exists():
                raise UserError(f"{path / file}.pt is missing: the checkpoint is not whole")
            tensors[kind][path.name] = _universal_tensor(path / f"{file}.pt")
        # From stage 3 the steps are where the optimizer kept them.
        if (path / "step.pt").exists():
            steps[path.name] = _number(load(path / "step.pt", str(path / "step.pt")), path / "step.pt")
    path = folder / "zero" / "optimizer_state.pt"
    state = _file(path)
    inner = _dict(state.get("optimizer_state_dict") or {}, str(path))
    for index, entry in _dict(inner.get("state") or {}, str(path)).items():
        steps[f"group {index}"] = _number(_dict(entry, str(path)).get("step"), path)
    model = _universal_model(folder)
    return ForeignState(
        folder, tensors, one_step(steps, folder), samples=_count(model, "global_samples"), batch=_batch(model),
        groups=[settings(group) for group in state.get("param_groups") or []],
        about={"format": "deepspeed", "universal": True, "zero": state.get("zero_stage"),
               "version": str(model.get("ds_version"))[:40]},
    )  # fmt: skip


def _universal_model(folder: Path) -> dict[str, Any]:
    for path in sorted(folder.glob("*mp_rank_*_model_states.pt")):
        with suppress(UserError):
            return _file(path)
    return {}


def _universal_tensor(path: Path) -> ForeignTensor:
    tensor, shape = _universal_content(path)
    dtype = dtype_name(tensor.dtype, str(path))
    return ForeignTensor(
        shape, dtype, tensor.numel(), lambda: elements(_universal_content(path)[0], str(path)), str(path)
    )


def _universal_content(path: Path) -> tuple[Any, tuple[int, ...] | None]:
    """(tensor, its shape): up to stage 2 it comes with how it would be split; from stage 3 as elements in a row."""
    found = load(path, str(path))
    tensor: Any = found.get("param") if isinstance(found, dict) else found
    if not hasattr(tensor, "numel"):
        raise UserError(f"{path} does not hold a tensor")
    return tensor, tuple(tensor.shape) if isinstance(found, dict) else None


# What the run says of itself.


def _file(path: Path) -> dict[Any, Any]:
    return _dict(load(path, str(path), _NAMES), str(path))


def _dict(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: there is not what DeepSpeed writes there")
    return value


def _number(value: Any, path: Path) -> float:
    return number(value, f"{path} does not say how many steps AdamW has made")


def _count(model: dict[str, Any], name: str) -> int | None:
    value = model.get(name)
    return value if type(value) is int and 0 <= value < 1 << 48 else None


def _batch(model: dict[str, Any]) -> int | None:
    config = model.get("ds_config")
    return _count(config, "train_batch_size") if isinstance(config, dict) else None
