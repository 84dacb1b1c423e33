"""Low-rank adapters in `peft`'s format: read to start from, written for others to load.

A folder has `adapter_config.json` and `adapter_model.safetensors`. Checked against peft 0.21.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.dtypes import finite, numpy_dtype, raw
from shardwise.checkpoint.geometry import Piece, full
from shardwise.checkpoint.huggingface.output import Exported, OutputFolder
from shardwise.checkpoint.huggingface.tensor_file import FileTensor, tensors_of
from shardwise.checkpoint.huggingface.weights import checked, read_parts
from shardwise.checkpoint.manifest import TensorSpec
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.resharding import model_of
from shardwise.checkpoint.writer import safetensors_header
from shardwise.errors import UserError, os_errors
from shardwise.model import ModelConfig
from shardwise.model.adapters import A, names_of_map
from shardwise.model.blueprint import ForeignSlice, Parameter
from shardwise.model.lora import Lora
from shardwise.model.parameters import blueprint, parameters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_READ = ("peft_type", "r", "lora_alpha", "target_modules", "base_model_name_or_path", "init_lora_weights", "bias")
"""Settings of `LoraConfig` that are read, or checked one by one."""
_WITHOUT_EFFECT = (
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "megatron_core",
    "layers_pattern", "qalora_group_size", "runtime_config", "eva_config",
)  # fmt: skip
"""Settings that change nothing in what trained adapters compute, or nothing without another one."""
_STARTS: tuple[Any, ...] = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base as it is; the others keep a base of their own."""


class PeftAdapters:
    """The adapters in a folder: `model` has them, `read` gets them. Names are `model/<parameter>`."""

    def __init__(
        self, folder: Path, model: ModelConfig, stored: dict[str, tuple[ForeignSlice, FileTensor]], base: str | None
    ) -> None:
        self.folder, self.model, self.base = folder, model, base
        self.dropout = 0.0
        """Dropout before the adapters with which they were trained. It does nothing in use, and is not there in
        training here."""
        self._stored = {f"model/{name}": place for name, place in stored.items()}

    @classmethod
    def open(cls, folder: Path, base: ModelConfig) -> PeftAdapters:
        """The adapters in a folder, for this model, whose `lora` may say the base's dtype.

        Raises `UserError` naming the file when there are none, a setting is not supported, or tensors are missing,
        unknown or of other shapes.
        """
        config = _read_config(folder)
        lora = _lora_of(config, folder / CONFIG)
        model = base.replace(lora=replace(lora, base=base.lora.base) if base.lora else lora)
        tensors, stored = tensors_of(folder / WEIGHTS), {}
        for p, place in _places(model):
            if place.tensor not in tensors:
                raise UserError(f"{folder / WEIGHTS} lacks {place.tensor}, which {CONFIG} says it has")
            stored[p.name] = place, checked(tensors.pop(place.tensor), place.shape)
        if tensors:
            raise UserError(f"{folder / WEIGHTS} has {next(iter(tensors))}, which the adapters of {CONFIG} lack")
        name = config.get("base_model_name_or_path")
        found = cls(folder, model, stored, name if isinstance(name, str) else None)
        found.dropout = config.get("lora_dropout") or 0.0
        return found

    @property
    def warning(self) -> str:
        """A setting that training leaves out; empty without one."""
        return f"{self.folder} has lora_dropout={self.dropout:g}: it trains without it" if self.dropout else ""

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `UserError` unless these are exactly the tensors that are here (stored name -> shape)."""
        if shapes != {name: place.shape for name, (place, _) in self._stored.items()}:
            raise UserError(f"{self.folder} has the adapters of another model")

    def read(self, tensor: str, piece: Piece | None = None, dtype: str | None = None) -> np.ndarray:
        """The elements of a piece of a factor, as `Checkpoint.read` gives them."""
        place, file = self._stored[tensor]
        piece, dtype = piece or Piece.whole(full(place.shape)), dtype or file.spec.dtype
        out = np.zeros(piece.numel, numpy_dtype(dtype))
        read_parts(((0, place, file),), place.shape, piece, dtype, out)
        return out


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder} has no {CONFIG}: give a folder of peft's adapters, or a text such as rank=16")
    with os_errors(f"read {path}"):
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            content = None
    if not isinstance(content, dict) or content.get("peft_type") != "LORA":
        raise UserError(f"{path} does not describe LoRA adapters (peft_type LORA)")
    return content


def _check_settings(config: dict[str, Any], path: Path) -> None:
    """Raise `UserError` for a setting that is on and not known to leave alpha / r · (x Aᵀ) Bᵀ beside the base."""
    for name, value in config.items():
        off = value is None or value is False or value in ("", [], {})
        if not off and name not in (*_READ, *_WITHOUT_EFFECT):
            raise UserError(f"{path}: {name}={value!r} is not supported here: leave it out, or merge with peft")
    if (bias := config.get("bias", "none")) not in ("none", None):
        raise UserError(f"{path}: bias={bias!r} is not supported here: choose bias='none', or merge with peft")
    if (start := config.get("init_lora_weights")) and start not in _STARTS:
        raise UserError(
            f"{path}: init_lora_weights={start!r} changes the base, which these adapters do not have: let peft convert "
            "them (save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _lora_of(config: dict[str, Any], path: Path) -> Lora:
    _check_settings(config, path)
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets:
        raise UserError(f"{path}: target_modules must be a list of names, not {targets!r}")
    try:
        return Lora(config["r"], config.get("lora_alpha", 8), tuple(sorted(targets)))
    except KeyError:
        raise UserError(f"{path} lacks r, the rank") from None


def _places(model: ModelConfig) -> Iterator[tuple[Parameter, ForeignSlice]]:
    """(parameter, its place) of every factor. Raises `UserError` where `peft` has no such adapter."""
    for p in parameters(model):
        if p.frozen:
            continue
        if p.foreign is None:
            raise UserError(
                f"{p.name} adapts a part of a map that Hugging Face's {model.name} has as one: peft's format has an "
                "adapter for all of it"
            )
        yield p, p.foreign


def export_adapters(checkpoint: Checkpoint, folder: Path | str) -> Exported:
    """Write the adapters of a checkpoint to a new folder in `peft`'s format, in fp32, as `peft` does. Raises
    `UserError` when it has none, `peft` has no such adapters, or the folder cannot be written; nothing is left then."""
    model = model_of(checkpoint)
    if model.lora is None:
        raise UserError(f"{checkpoint.folder} has no adapters: its run trained all weights")
    tensors = [(f"model/{p.name}", place.tensor, TensorSpec(p.shape, "float32")) for p, place in _places(model)]

    nonfinite: list[str] = []

    def contents() -> Iterator[bytes | memoryview]:
        yield safetensors_header({"format": "pt"}, [(theirs, spec) for _, theirs, spec in tensors])
        for ours, theirs, spec in tensors:
            values = checkpoint.read(ours, None, spec.dtype)
            nonfinite.extend([] if finite(values, spec.dtype) else [theirs])
            yield raw(values)

    base = checkpoint.manifest.about.get("weights")
    with OutputFolder.new(Path(folder)) as output:
        output.write(WEIGHTS, contents())
        output.write_json(CONFIG, _config_of(model, model.lora, base if isinstance(base, str) else None))
    nbytes = sum(spec.nbytes for *_, spec in tensors)
    return Exported(output.folder, tuple(output.files), len(tensors), nbytes, tuple(nonfinite))


def _config_of(model: ModelConfig, lora: Lora, base: str | None) -> dict[str, Any]:
    """The settings of `peft.LoraConfig`."""
    (block, *_) = blueprint(model).of_kind("block")
    adapted = {p.name.removesuffix(A) + "weight" for p in block.parameters if p.name.endswith(f".{A}")}
    targets = {names_of_map(p)[-1] for p in block.parameters if p.name in adapted}
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
        "inference_mode": True,
    }
