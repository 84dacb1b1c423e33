"""Low-rank adapters in `peft`'s format: read to start from, written for others to load.

A folder has `adapter_config.json` and `adapter_model.safetensors`. Checked against peft 0.21.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwise.checkpoint.dtypes import bits, convert, finite, numpy_dtype, raw
from shardwise.checkpoint.geometry import Piece, copy, full
from shardwise.checkpoint.huggingface.companions import TOKENIZER, Companions, base_dtype, companions_of
from shardwise.checkpoint.huggingface.exporting import DTYPES, Exported, OutputFolder, export_weights
from shardwise.checkpoint.huggingface.tensor_file import FileTensor, tensors_of
from shardwise.checkpoint.huggingface.weights import HuggingFaceWeights, checked, open_weights, read_parts
from shardwise.checkpoint.manifest import TensorSpec
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.resharding import model_of, subject_of
from shardwise.checkpoint.writer import safetensors_header
from shardwise.errors import UserError, os_errors
from shardwise.model import ModelConfig
from shardwise.model.adapters import PEFT_NAMES, PEFT_TRUNK, A, B, factor_of, stacked_target
from shardwise.model.blueprint import ForeignSlice, Parameter
from shardwise.model.catalog import resolve
from shardwise.model.lora import Lora
from shardwise.model.parameters import Model, parameters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_READ = (
    "peft_type", "r", "lora_alpha", "target_modules", "target_parameters", "base_model_name_or_path",
    "init_lora_weights", "bias",
)  # fmt: skip
"""Settings of `LoraConfig` that are read, or checked one by one."""
_WITHOUT_EFFECT = (
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "megatron_core",
    "layers_pattern", "qalora_group_size", "runtime_config", "eva_config",
)  # fmt: skip
"""Settings that change nothing in what trained adapters compute, or nothing without another one."""
_STARTS: tuple[Any, ...] = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base as it is; the others keep a base of their own."""


@dataclass(frozen=True)
class PeftPlace:
    """Where `peft` stores a factor."""

    tensor: str
    shape: tuple[int, ...]
    stack: tuple[int, ...] = ()
    """Shape of a factor of stacked experts, whose dims `peft` has in the order of `axes`; empty for others."""
    axes: tuple[int, ...] = ()

    @classmethod
    def of(cls, p: Parameter, outer: int) -> "PeftPlace":
        """Of a class of transformers, by the parameter's name. outer: adapted weights of the same experts after it,
        around which `peft` wraps theirs."""
        weight, factor = factor_of(p.name)
        if not p.module_shape:
            tensor = f"{PEFT_TRUNK}{weight.removesuffix('weight')}{PEFT_NAMES[factor]}"
            return cls(tensor, p.shape)
        inner = (factor == A) != p.transposed
        axes = ((0, 2, 1) if p.transposed else (0, 1, 2)) if inner else ((2, 1, 0) if p.transposed else (1, 2, 0))
        sizes = [p.module_shape[axis] for axis in axes]
        shape = (sizes[0] * sizes[1], sizes[2]) if inner else (sizes[0], sizes[1] * sizes[2])
        owner = f"{PEFT_TRUNK}{weight.rpartition('.')[0]}.{'base_layer.' * outer}"
        return cls(f"{owner}{PEFT_NAMES[A if inner else B]}", shape, p.module_shape, axes)

    def theirs(self, values: np.ndarray) -> np.ndarray:
        """A factor's values in `peft`'s order."""
        return np.ascontiguousarray(values.reshape(self.stack).transpose(self.axes)) if self.stack else values

    def ours(self, values: np.ndarray) -> np.ndarray:
        """The way back."""
        if not self.stack:
            return values
        permuted = values.reshape([self.stack[axis] for axis in self.axes])
        return np.ascontiguousarray(permuted.transpose(np.argsort(self.axes))).reshape(-1)


class PeftAdapters:
    """The adapters in a folder: `model` has them, `read` gets them. Names are `model/<parameter>`."""

    def __init__(
        self, folder: Path, model: ModelConfig, stored: dict[str, tuple[Parameter, PeftPlace, FileTensor]],
        base: str | None,
    ) -> None:  # fmt: skip
        self.folder, self.model, self.base = folder, model, base
        self.dropout = 0.0
        """Dropout before the adapters with which they were trained. It does nothing in use, and is not there in
        training here."""
        self._stored = {f"model/{name}": place for name, place in stored.items()}

    @classmethod
    def open(cls, folder: Path, base: ModelConfig, parts: Model | None = None) -> "PeftAdapters":
        """The adapters in a folder, for this model, whose `lora` may say the base's dtype. parts: of a model by its
        class of transformers, with its adapters; without them the folder's tensors are not looked at.

        Raises `UserError` naming the file when there are none, a setting is not supported, or tensors are missing,
        unknown or of other shapes.
        """
        config = _read_config(folder)
        lora = _lora_of(config, folder / CONFIG)
        model = base.replace(lora=replace(lora, base=base.lora.base) if base.lora else lora)
        tensors, stored = tensors_of(folder / WEIGHTS), {}
        unseen = model.counted is not None and parts is None
        for p, place in () if unseen else _places(parts or model):
            if place.tensor not in tensors:
                raise UserError(f"{folder / WEIGHTS} lacks {place.tensor}, which {CONFIG} says it has")
            stored[p.name] = p, place, checked(tensors.pop(place.tensor), place.shape)
        if tensors and not unseen:
            raise UserError(f"{folder / WEIGHTS} has {next(iter(tensors))}, which the adapters of {CONFIG} lack")
        name = config.get("base_model_name_or_path")
        found = cls(folder, model, stored, name if isinstance(name, str) else None)
        found.dropout = config.get("lora_dropout") or 0.0
        return found

    @property
    def warning(self) -> str:
        return f"{self.folder} has lora_dropout={self.dropout:g}: it trains without it" if self.dropout else ""

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `UserError` unless these are exactly the tensors that are here (stored name -> shape)."""
        if shapes != {name: p.shape for name, (p, *_) in self._stored.items()}:
            raise UserError(f"{self.folder} has the adapters of another model")

    def read(self, tensor: str, piece: Piece | None = None, dtype: str | None = None) -> np.ndarray:
        """The elements of a piece of a factor, as `Checkpoint.read` gives them."""
        p, place, file = self._stored[tensor]
        piece, dtype = piece or Piece.whole(full(p.shape)), dtype or file.spec.dtype
        out = np.zeros(piece.numel, numpy_dtype(dtype))
        whole = ForeignSlice(place.tensor, place.shape, 0, place.shape[0], place.shape[0])
        if not place.stack:
            read_parts(((0, whole, file),), place.shape, piece, dtype, out)
            return out
        stack, every = np.zeros(p.numel, numpy_dtype(dtype)), Piece.whole(full(place.shape))
        read_parts(((0, whole, file),), place.shape, every, dtype, stack)
        copy(bits(out), piece, bits(place.ours(stack)), Piece.whole(full(p.shape)))
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
    targets, stacks = config.get("target_modules"), config.get("target_parameters") or []
    if not isinstance(stacks, list):
        raise UserError(f"{path}: target_parameters must be a list of names, not {stacks!r}")
    if not isinstance(targets or [], list) or not (targets or stacks):
        raise UserError(f"{path}: target_modules must be a list of names, not {targets!r}")
    names = sorted({*(targets or []), *(stacked_target(str(name)) for name in stacks)})
    try:
        return Lora(config["r"], config.get("lora_alpha", 8), tuple(names))
    except KeyError:
        raise UserError(f"{path} lacks r, the rank") from None


def _places(model: Model) -> Iterator[tuple[Parameter, PeftPlace]]:
    """(parameter, its place) of every factor. Raises `UserError` where `peft` has no such adapter."""
    trained = [p for p in parameters(model) if not p.frozen]
    within: dict[str, list[str]] = {}
    """Module -> its weights that have adapters."""
    for weight in dict.fromkeys(factor_of(p.name)[0] for p in trained):
        within.setdefault(weight.rpartition(".")[0], []).append(weight)
    for p in trained:
        if not isinstance(model, ModelConfig):
            weight, _ = factor_of(p.name)
            beside = within[weight.rpartition(".")[0]]
            yield p, PeftPlace.of(p, len(beside) - 1 - beside.index(weight))
        elif p.foreign is None:
            raise UserError(
                f"{p.name} adapts a part of a map that Hugging Face's {model.name} has as one: peft's format has an "
                "adapter for all of it"
            )
        else:
            yield p, PeftPlace(p.foreign.tensor, p.foreign.shape)


def export_adapters(checkpoint: Checkpoint, folder: Path | str) -> Exported:
    """Write the adapters of a checkpoint to a new folder in `peft`'s format, in fp32, as `peft` does. Raises
    `UserError` when it has none, `peft` has no such adapters, or the folder cannot be written; nothing is left then."""
    model = model_of(checkpoint)
    if model.lora is None:
        raise UserError(f"{checkpoint.folder} has no adapters: its run trained all weights")
    places = list(_places(subject_of(checkpoint)))
    specs = [(place.tensor, TensorSpec(place.shape, "float32")) for _, place in places]
    nonfinite: list[str] = []

    def contents() -> Iterator[bytes | memoryview]:
        yield safetensors_header({"format": "pt"}, specs)
        for (p, place), (theirs, spec) in zip(places, specs, strict=True):
            values = place.theirs(checkpoint.read(f"model/{p.name}", None, spec.dtype))
            nonfinite.extend([] if finite(values, spec.dtype) else [theirs])
            yield raw(values)

    base = checkpoint.manifest.about.get("weights")
    with OutputFolder.new(Path(folder)) as output:
        output.write(WEIGHTS, contents())
        output.write_json(CONFIG, _config_of(places, model.lora, base if isinstance(base, str) else None))
    nbytes = sum(spec.nbytes for _, spec in specs)
    return Exported(output.folder, tuple(output.files), len(specs), nbytes, tuple(nonfinite))


def _config_of(places: list[tuple[Parameter, PeftPlace]], lora: Lora, base: str | None) -> dict[str, Any]:
    targets = {place.tensor.split(".")[-3] for _, place in places if not place.stack}
    stacks = {stacked_target(factor_of(p.name)[0]) for p, place in places if place.stack}
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        **({"target_parameters": sorted(stacks)} if stacks else {}),
        "bias": "none",
        "inference_mode": True,
    }


class ReadsFactors(Protocol):
    """A checkpoint, or `peft`'s adapters, as far as merging reads them."""

    def read(self, tensor: str, piece: Piece | None = None, dtype: str | None = None) -> np.ndarray: ...


class MergedWeights:
    """The weights of a model with its adapters added. Names are `model/<parameter>` of the model without them."""

    def __init__(self, base: HuggingFaceWeights, model: ModelConfig, adapters: ReadsFactors) -> None:
        self._base, self._adapters = base, adapters
        assert model.lora
        self._scale = model.lora.scale
        self._shapes = {f"model/{p.name}": p.shape for p in parameters(model) if not p.frozen}

    def read(self, tensor: str, piece: Piece, dtype: str) -> np.ndarray:
        """The elements of a box of a parameter. The sum is made in fp32."""
        a, b = (tensor.removesuffix("weight") + factor for factor in (A, B))
        if a not in self._shapes:
            return self._base.read(tensor, piece, dtype)
        (top, bottom), (left, right) = piece.box
        rank, inputs = self._shapes[a]
        columns = self._adapters.read(a, Piece.whole(((0, rank), (left, right))), "float32").reshape(rank, -1)
        rows = self._adapters.read(b, Piece.whole(((top, bottom), (0, rank))), "float32").reshape(-1, rank)
        weight = self._base.read(tensor, piece, "float32")
        weight += np.float32(self._scale) * (rows @ columns).reshape(-1)
        assert piece == Piece.whole(piece.box) and right <= inputs
        return convert(weight, "float32", dtype)


def merge(adapters: Path, folder: Path, base: Path | None = None, dtype: str | None = None) -> Exported:
    """Write the weights with adapters merged to a new Hugging Face folder.

    adapters: `peft`'s folder. base: the Hugging Face folder that they were trained beside; None for the one that they
    name. dtype: as of `export`. Raises `UserError` when base and adapters do not suit each other, or a folder cannot be
    read or written.
    """
    if not (adapters / CONFIG).is_file():
        raise UserError(f"{adapters} has no {CONFIG}")
    if base is None:
        base = _named_base(adapters)
    if base.is_dir() and resolve(str(base)).counted:
        raise UserError(
            f"{base} is of a class of transformers, whose adapters are merged from their run or checkpoint, or by peft"
        )
    weights = HuggingFaceWeights.open(base)
    found = PeftAdapters.open(adapters, weights.model)
    return _merged(weights, found.model, found, folder, dtype)


def merge_checkpoint(
    checkpoint: Checkpoint, folder: Path, base: Path | None = None, dtype: str | None = None
) -> Exported:
    """`merge` of the adapters of a checkpoint. base: None for the weights that its run started from. Raises `UserError`
    as `merge`, and for a run without adapters."""
    model = model_of(checkpoint)
    weights = open_weights(base_of(checkpoint, base), model)
    return _merged(weights, model, checkpoint, folder, dtype, companions_of(checkpoint))


def base_of(checkpoint: Checkpoint, base: Path | None) -> Path:
    """The folder of the weights beside which a checkpoint's adapters were trained. Raises `UserError` for a run without
    adapters, or without a folder."""
    named = checkpoint.manifest.about.get("weights")
    if model_of(checkpoint).lora is None:
        raise UserError(f"{checkpoint.folder} has no adapters: its run trained all weights (checkpoint export)")
    if base is None and not isinstance(named, str):
        raise UserError(
            f"{checkpoint.folder}: its run started from random weights, which are in no folder: give --base"
        )
    if base is None and not Path(str(named)).is_dir():
        raise UserError(f"{checkpoint.folder}: its run started from {named}, which is not there: give --base")
    return base or Path(str(named))


def _named_base(adapters: Path) -> Path:
    name = json.loads((adapters / CONFIG).read_bytes()).get("base_model_name_or_path")
    if not isinstance(name, str) or not Path(name).is_dir():
        names = f"names {name!r}, which is no folder here" if name else "names no base"
        raise UserError(f"{adapters / CONFIG} {names}: give the weights with --base")
    return Path(name)


def _merged(
    base: HuggingFaceWeights, model: ModelConfig, adapters: ReadsFactors, folder: Path, dtype: str | None,
    kept: Path | None = None,
) -> Exported:  # fmt: skip
    """kept: where the run of the adapters keeps what was beside its tokenizer."""
    beside = kept or (base.folder if (base.folder / TOKENIZER).is_file() else None)
    companions = Companions(beside / TOKENIZER, beside) if beside else None
    source = MergedWeights(base, model, adapters)
    dtype = dtype or base_dtype(base.folder, DTYPES) or DTYPES[0]
    return export_weights(source, base.model, folder, dtype, companions)
