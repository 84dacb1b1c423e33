"""From a checkpoint of ours to another trainer's: weights and AdamW's state, under names of Hugging Face or of ours.

`torch.distributed.checkpoint` (FSDP2) and DeepSpeed's universal format have files of torch's: both need torch. One
tensor is in memory at a time.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.dtypes import finite, numpy_dtype
from shardwise.checkpoint.foreign.convert import LIVE_HEAD, MOMENTS
from shardwise.checkpoint.foreign.dcp import write_dcp
from shardwise.checkpoint.foreign.state import SETTINGS, WrittenState, WrittenTensor
from shardwise.checkpoint.foreign.universal_writing import write_universal
from shardwise.checkpoint.huggingface.exporting import ExportTensor, bands, export_tensors
from shardwise.checkpoint.manifest import TensorSpec
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.resharding import model_of
from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.blueprint import ForeignSlice
from shardwise.model.families import family_of
from shardwise.model.parameters import blueprint, parameters

_WRITERS: dict[str, Callable[[WrittenState, Path], None]] = {
    "dcp": write_dcp,
    "deepspeed-universal": write_universal,
}
EXPORT_FORMATS = tuple(_WRITERS)
NAMES = ("huggingface", "shardwise")
"""Names of parameters: of transformers' model, or of shardwise's decoder."""


@dataclass(frozen=True)
class ForeignExport:
    """Result of an export: the folder, tensors in it, and the bytes of all tensors. nonfinite: tensors with an element
    that is not finite."""

    folder: Path
    tensors: int
    nbytes: int
    nonfinite: tuple[str, ...] = ()


def export_foreign(
    checkpoint: Checkpoint, folder: Path | str, format: str, *, names: str = "huggingface", weights_only: bool = False
) -> ForeignExport:
    """Write a checkpoint to a new folder as another trainer would have.

    format: one of `EXPORT_FORMATS`. names: one of `NAMES`. weights_only: leave AdamW's state out. Elements keep their
    bits. Raises `UserError` without torch, for a state that is not AdamW's, for a model without such names, for a
    folder in use or that cannot be written, and for a damaged checkpoint; nothing of it is left.
    """
    folder = Path(folder)
    for value, known, what in ((format, EXPORT_FORMATS, "format"), (names, NAMES, "names")):
        if value not in known:
            raise UserError(f"unknown {what} {value!r}; choose one of {', '.join(known)}")
    state = written_state(checkpoint, names, weights_only)
    if format == "deepspeed-universal" and not state.kinds[1:]:
        raise UserError("DeepSpeed's universal format holds AdamW's state: choose another format for weights alone")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty; nothing was overwritten: choose another folder")
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _WRITERS[format](state, folder)
    except BaseException as error:
        _clear(folder, new)
        if isinstance(error, OSError):
            raise UserError(f"cannot write to {folder}: {error.strerror}") from None
        raise
    sizes = [tensor.spec.nbytes for kind in state.kinds for tensor in state.tensors[kind]]
    return ForeignExport(folder, len(sizes), sum(sizes), tuple(state.nonfinite))


def _clear(folder: Path, new: bool) -> None:
    """Remove what was written to a folder that was empty, and the folder where it is new."""
    with suppress(OSError):
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if new:
            folder.rmdir()


def written_state(checkpoint: Checkpoint, names: str, weights_only: bool) -> WrittenState:
    """A checkpoint as other trainers' formats need it; tensors are read when they are asked for. Raises `UserError`."""
    model = model_of(checkpoint)
    if model.lora:
        raise UserError(f"{checkpoint.folder} has adapters alone, which are exported for peft: leave out --format")
    held = {name.partition("/")[0] for name in checkpoint.tensors}
    moments = () if weights_only else MOMENTS
    if held - {"model", *MOMENTS} or not {*moments} <= held:
        raise UserError(
            f"{checkpoint.folder} has {', '.join(sorted(held))}, which is no AdamW state: export its weights with "
            "--weights-only"
        )
    tensors = _huggingface(model) if names == "huggingface" else _ours(model)
    kinds = ("model", *moments)
    bad: dict[str, None] = {}
    written = {kind: [_written(checkpoint, kind, tensor, bad) for tensor in tensors] for kind in kinds}
    decays = {p.name: p.decay for p in parameters(model)}
    manifest = checkpoint.manifest
    workload = manifest.about.get("workload")
    batch = workload.get("batch") if isinstance(workload, dict) else None
    return WrittenState(
        kinds, written, {LIVE_HEAD: _table(tensors, model)} if model.tied and names == "huggingface" else {},
        {tensor.name: decays[tensor.parts[0][0]] for tensor in tensors},
        _settings(checkpoint) if moments else {}, manifest.optimizer_steps, manifest.step, manifest.samples,
        batch if isinstance(batch, int) else None, bad,
    )  # fmt: skip


def _written(checkpoint: Checkpoint, kind: str, tensor: ExportTensor, bad: dict[str, None]) -> WrittenTensor:
    dtype = checkpoint.tensors[f"{kind}/{tensor.parts[0][0]}"].dtype
    tensor = replace(tensor, spec=TensorSpec(tensor.spec.shape, dtype))

    def read() -> np.ndarray:
        values = np.empty(tensor.spec.numel, numpy_dtype(dtype))
        at = 0
        for band in bands(checkpoint, tensor, kind):
            values[at : at + band.size] = band.reshape(-1)
            at += band.size
        if not finite(values, dtype):
            bad[f"{kind}/{tensor.name}"] = None
        return values

    return WrittenTensor(tensor.name, tensor.spec, read)


def _huggingface(model: ModelConfig) -> list[ExportTensor]:
    """Tensors of the model that transformers has in memory: its head has one name in all families."""
    if model.experts:
        raise UserError(f"{model.name}: transformers fuses experts in memory: add --names shardwise")
    names = family_of(model).names
    if names is None or any(p.foreign is None for p in parameters(model)):
        raise UserError(f"no family of Hugging Face computes {model.name}: add --names shardwise")
    return [
        replace(tensor, name=LIVE_HEAD) if tensor.name == names.head else tensor
        for tensor in export_tensors(model, "float32")
    ]


def _ours(model: ModelConfig) -> list[ExportTensor]:
    return [
        ExportTensor(
            p.name,
            TensorSpec(p.shape, "float32"),
            [(p.name, 0, p.shape[0], ForeignSlice(p.name, p.shape, 0, p.shape[0], p.shape[0]))],
        )
        for p in parameters(model)
    ]


def _table(tensors: list[ExportTensor], model: ModelConfig) -> str:
    table = blueprint(model).table.name
    return next(tensor.name for tensor in tensors if tensor.parts[0][0] == table)


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """AdamW's settings by torch's names: of the run that wrote the checkpoint, or of the trainer it was imported from.
    The learning rate is the peak of its schedule."""
    about = checkpoint.manifest.about
    imported = about.get("imported")
    groups = imported.get("optimizer") if isinstance(imported, dict) else None
    known = about.get("optimizer") or max(groups or [{}], key=lambda group: group.get("weight_decay", 0.0))
    if not isinstance(known, dict) or (missing := [name for name in SETTINGS if name not in known]):
        raise UserError(
            f"{checkpoint.folder} does not say its AdamW's {', '.join(missing)}: export its weights with --weights-only"
        )
    return {name: tuple(known[name]) if name == "betas" else known[name] for name in SETTINGS}
