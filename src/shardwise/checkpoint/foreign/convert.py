"""From another trainer's state to a checkpoint of ours: find each parameter, and write it and its moments, one by one.

Names are our decoder's or Hugging Face's, behind whatever prefix. A moment lies as its weight does, so that what is
transposed or fused there is cut the same way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.dtypes import bits
from shardwise.checkpoint.folder import new_folder
from shardwise.checkpoint.foreign import dcp, deepspeed
from shardwise.checkpoint.foreign.state import SETTINGS, ForeignState, ForeignTensor, distinct, dtype_name, quoted
from shardwise.checkpoint.geometry import Piece, full
from shardwise.checkpoint.manifest import Manifest, PartRecord, TensorSpec
from shardwise.checkpoint.names import unwrapped_names
from shardwise.checkpoint.writer import PartEntry, PartWriter, commit
from shardwise.errors import UserError, near_path
from shardwise.model import ModelConfig
from shardwise.model.blueprint import ForeignSlice
from shardwise.model.families import family_of
from shardwise.model.parameters import blueprint, foreign_slices, parameters
from shardwise.small_files import json_object_in

_READERS = {"dcp": dcp.read, "deepspeed": deepspeed.read}
FORMATS = tuple(_READERS)
"""torch.distributed.checkpoint (FSDP2), and DeepSpeed's ZeRO-1/2/3 and universal checkpoints."""


def open_foreign(folder: Path | str, format: str = "auto", *, weights_only: bool = False) -> ForeignState:
    """The state in a folder. format: one of `FORMATS`, or "auto" to look what it is. weights_only: leave the
    optimizer out.

    Only names and shapes are read. Raises `UserError` when it is of no format that is read here, or damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}{near_path(folder, folder=True)}")
    if format not in (*FORMATS, "auto"):
        raise UserError(f"unknown format {format!r}; choose auto or one of {', '.join(FORMATS)}")
    _refuse_megatron(folder)
    read = _READERS[_detect(folder) if format == "auto" else format]
    state = read(folder, weights_only)
    return replace(state, tensors={kind: unwrapped_names(tensors) for kind, tensors in state.tensors.items()})


def _detect(folder: Path) -> str:
    if (folder / ".metadata").exists():
        return "dcp"
    if deepspeed.is_one(folder):
        return "deepspeed"
    raise UserError(
        f"{folder} holds neither .metadata (torch.distributed.checkpoint) nor DeepSpeed's *_optim_states.pt or zero/ "
        "(ZeRO, universal); Hugging Face folders are read by train --weights"
    )


def _refuse_megatron(folder: Path) -> None:
    """megatron-core 0.16 neither trains nor saves without CUDA: none can be made where shardwise is tested."""
    torch_dist = "sharded_backend" in json_object_in(folder / "metadata.json")
    if torch_dist or (folder / "latest_checkpointed_iteration.txt").exists():
        raise UserError(
            f"{folder} is a Megatron-LM checkpoint, which shardwise does not read: export it as a Hugging Face folder, "
            "for train --weights"
        )


_SUFFIXES = {"model": "", "first": ".exp_avg", "second": ".exp_avg_sq"}
MOMENTS = ("first", "second")
LIVE_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ResumeSettings:
    """Settings that `train --resume` needs and another trainer's checkpoint does not contain.

    data, tokenizer: as for `train`. seq: tokens a sequence. batch: sequences a step; None takes the other run's.
    """

    data: str
    tokenizer: str
    seq: int
    batch: int | None = None


def import_checkpoint(
    folder: Path | str,
    out: Path | str,
    model: ModelConfig,
    *,
    format: str = "auto",
    weights_only: bool = False,
    run: ResumeSettings | None = None,
) -> Manifest:
    """Write another trainer's checkpoint of `model` as one of ours to a new folder; one tensor is in memory at a time.

    format: "dcp", "deepspeed" or "auto". weights_only: leave AdamW's state out, also where there is one. run: how the
    training goes on; without it the weights can be exported or resharded, but `train --resume` lacks its data.
    Raises `UserError` when the folder is damaged or of another format, its tensors are not those of the model, or `out`
    is in use or cannot be written; nothing is left then.
    """
    folder, out = Path(folder), Path(out)
    if reason := model.why_not_runnable():
        raise UserError(f"{model.name}: {reason}")
    with new_folder(out, clear=True):
        return _imported(folder, out, model, format, weights_only, run)


def _imported(
    folder: Path, out: Path, model: ModelConfig, format: str, weights_only: bool, run: ResumeSettings | None
) -> Manifest:
    state = open_foreign(folder, format, weights_only=weights_only)
    held = bool(state.tensors.get("first")) and not weights_only
    if held and state.steps is None:
        raise UserError(f"{state.folder} does not say how many steps its optimizer has made")
    if run is not None and not held:
        raise UserError(f"{state.folder} has no optimizer state to go on from: leave data, seq and tokenizer out")
    found = {kind: _locate(state, kind, model) for kind in ("model", *(MOMENTS if held else ()))}
    about = _about(state, model, found["model"], held, run)
    steps = (state.steps or 0) if held else 0
    batch = about["workload"]["batch"] if run is not None else state.batch
    samples = state.samples if state.samples is not None else steps * (batch or 0)
    record = _write(out, model, found)
    manifest = Manifest.of([record], step=steps, samples=samples, seed=0, optimizer_steps=steps, about=about)
    commit(out, manifest)
    return manifest


# Which tensor is which parameter.

Found = dict[str, tuple[ForeignTensor, ForeignSlice]]


def _locate(state: ForeignState, kind: str, model: ModelConfig) -> Found:
    """Parameter -> the tensor that holds it, and where in it."""
    tensors = state.tensors[kind]
    ours = {p.name: ForeignSlice(p.name, p.shape, 0, p.shape[0], p.shape[0]) for p in parameters(model)}
    for wanted in (ours, _live(foreign_slices(model), tensors)):
        anchor = wanted[blueprint(model).table.name].tensor
        prefixes = [name.removesuffix(anchor) for name in tensors if name.endswith(anchor)]
        prefixes = [prefix for prefix in prefixes if not prefix or prefix.endswith(".")]
        if len(prefixes) > 1:
            raise UserError(f"{state.folder} holds {len(prefixes)} models, under {', '.join(map(repr, prefixes))}")
        if prefixes and wanted is not ours and model.experts:
            raise UserError(
                f"{state.folder} has experts under the names of Hugging Face, which are read only from files of "
                "save_pretrained: start from such a folder with train --weights"
            )
        if prefixes:
            break
    else:
        example = quoted(next(iter(tensors), "nothing"))
        raise UserError(
            f"{state.folder} has {example}, but neither embedding.tokens.weight (shardwise) nor "
            f"{anchor} (Hugging Face): it is of another model, or under other names"
        )
    found: Found = {}
    for name, place in wanted.items():
        key = prefixes[0] + place.tensor
        if key not in tensors:
            raise UserError(f"{state.folder} has no {key}{_SUFFIXES[kind]}, which {model.name} has")
        found[name] = (_checked(tensors[key], place), place)
    _refuse_more(state, kind, model, prefixes[0], wanted)
    return found


def _live(wanted: dict[str, ForeignSlice], tensors: Mapping[str, ForeignTensor]) -> dict[str, ForeignSlice]:
    """Hugging Face's places, the head as a live model has it: transformers 5 knows one name for it, its files two."""
    head = wanted.get("head.out.weight")
    if head is None or any(name.endswith(head.tensor) for name in tensors):
        return wanted
    return wanted | {"head.out.weight": replace(head, tensor=LIVE_HEAD)}


def _checked(tensor: ForeignTensor, place: ForeignSlice) -> ForeignTensor:
    expected = place.shape
    if tensor.shape != expected if tensor.shape is not None else tensor.numel != int(np.prod(expected)):
        shape = tensor.shape if tensor.shape is not None else f"{tensor.numel} elements"
        raise UserError(f"{tensor.where} has shape {shape}, not the model's {expected}")
    dtype_name(tensor.dtype, tensor.where)
    return tensor


def _refuse_more(
    state: ForeignState, kind: str, model: ModelConfig, prefix: str, wanted: dict[str, ForeignSlice]
) -> None:
    """A tensor of the model that nobody asks for means that it is another model."""
    known, names = {place.tensor for place in wanted.values()}, family_of(model).names
    assert names
    heads = (names.head, LIVE_HEAD)
    roots = {name.partition(".")[0] for name in (*known, *heads)}
    for key in state.tensors[kind]:
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name in known or name.partition(".")[0] not in roots:
            continue
        if names.ignored.fullmatch(name):
            continue
        if model.tied and name in heads:
            if kind == "model":
                head = state.tensors[kind][key]
                embedding = state.tensors[kind][prefix + wanted[blueprint(model).table.name].tensor]
                if head.numel != embedding.numel or not np.array_equal(bits(head.load()), bits(embedding.load())):
                    raise UserError(
                        f"{head.where} differs from the embedding, but in the model they are one: set tied=false"
                    )
            continue
        raise UserError(f"{state.folder} has {quoted(key)}, which {model.name} lacks")


# Writing.


def _write(out: Path, model: ModelConfig, found: dict[str, Found]) -> PartRecord:
    entries = [
        PartEntry(f"{kind}/{p.name}", TensorSpec(p.shape, place[p.name][0].dtype), Piece.whole(full(p.shape)))
        for kind, place in found.items()
        for p in parameters(model)
    ]
    with PartWriter(out, 0, entries) as writer:
        for values in _values(model, found):
            writer.write(values)
        return writer.finish()


def _values(model: ModelConfig, found: dict[str, Found]) -> Iterator[np.ndarray]:
    # A fused tensor holds several parameters, and its bias comes between them.
    @lru_cache(maxsize=2)
    def load(kind: str, name: str) -> np.ndarray:
        tensor = next(tensor for tensor, place in found[kind].values() if place.tensor == name)
        return tensor.load()

    for kind, parts in found.items():
        for p in parameters(model):
            tensor, place = parts[p.name]
            values = tensor.load() if place.shape == p.shape else load(kind, place.tensor)
            yield _cut(values, place, p.shape)


def _cut(values: np.ndarray, place: ForeignSlice, shape: tuple[int, ...]) -> np.ndarray:
    if place.run == place.stride and place.shape == shape and not place.transposed and not place.paired:
        return np.ascontiguousarray(values)
    matrix = bits(values).reshape(place.shape)
    matrix = matrix.T if place.transposed else matrix
    out = np.empty(shape, matrix.dtype)
    for row, theirs, count, step in place.runs(0, shape[0]):
        out[row : row + count] = matrix[theirs : theirs + (count - 1) * step + 1 : step]
    return out.reshape(-1).view(values.dtype)


# What is known of the run.


def _about(
    state: ForeignState, model: ModelConfig, found: Found, held: bool, run: ResumeSettings | None
) -> dict[str, Any]:
    """As `TrainConfig` writes it where the run can go on; else the model, and where it came from.

    held: whether AdamW's state is imported.
    """
    precision = {"float64": "fp64", "float32": "fp32"}.get(found["embedding.tokens.weight"][0].dtype)
    about: dict[str, Any] = {
        "model": model.to_json(),
        # One file holds everything, as one rank would have written it.
        "layout": "dp=1" + (f",precision={precision}" if precision else ""),
        "imported": {**state.about, "folder": state.folder.name, "optimizer": state.groups},
    }
    if held and (differs := _decays_norms(state)):
        about["imported"]["differs"] = [differs]
    if run is None:
        return about
    batch = run.batch or state.batch
    if not batch:
        raise UserError(f"{state.folder} does not say how many sequences a step has: give batch as well")
    return about | {
        "workload": {"seq": run.seq, "batch": batch},
        "data": run.data,
        "tokenizer": run.tokenizer,
        "out": "",
        "corpus": "",
        "steps": max(1, state.steps or 0),
        # The other trainer's schedule is unknown: its learning rate stays as it is. Nothing says that it clips, either.
        "optimizer": {**_optimizer(state), "warmup": 0, "final_share": 1.0, "clip": 0.0},
    }


def _decays_norms(state: ForeignState) -> str:
    """A sentence where every parameter group has weight decay: norms and biases can be in no other group then."""
    decays = [group.get("weight_decay") for group in state.groups]
    if not decays or not all(decays):
        return ""
    return (
        f"its AdamW decays every parameter (weight_decay {', '.join(f'{decay:g}' for decay in decays)}), norms and "
        "biases among them; a resumed run decays matrices alone"
    )


def _optimizer(state: ForeignState) -> dict[str, Any]:
    """The settings that all parameter groups share; weight decay is that of the groups that have one."""
    shared: dict[str, Any] = {}
    for name in SETTINGS:
        values = distinct([group[name] for group in state.groups if name in group])
        if name == "weight_decay" and len(values) > 1:
            values = [value for value in values if value]
        if len(values) != 1:
            listed = ", ".join(map(str, values)) or "none"
            raise UserError(f"{state.folder}: its parameter groups have {listed} as {name}, and here there is one")
        shared[name] = values[0]
    if not shared["lr"]:
        raise UserError(
            f"{state.folder}: its schedule has ended, at a learning rate of 0, and so would the run go on; leave data, "
            "seq and tokenizer out, and train from the weights"
        )
    return shared
