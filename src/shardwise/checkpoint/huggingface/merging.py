"""Adapters merged into the weights that they were trained beside: W + alpha / rank · B A, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from shardwise.checkpoint.dtypes import convert
from shardwise.checkpoint.geometry import Piece
from shardwise.checkpoint.huggingface.companions import TOKENIZER, Companions, base_dtype, companions_of
from shardwise.checkpoint.huggingface.exporting import DTYPES, export_weights
from shardwise.checkpoint.huggingface.output import Exported
from shardwise.checkpoint.huggingface.peft import CONFIG, PeftAdapters
from shardwise.checkpoint.huggingface.weights import HuggingFaceWeights, open_weights
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.resharding import model_of
from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.adapters import A, B
from shardwise.model.parameters import parameters


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
    weights = HuggingFaceWeights.open(base)
    found = PeftAdapters.open(adapters, weights.model)
    return _merged(weights, found.model, found, folder, dtype)


def merge_checkpoint(
    checkpoint: Checkpoint, folder: Path, base: Path | None = None, dtype: str | None = None
) -> Exported:
    """`merge` of the adapters of a checkpoint. base: None for the weights that its run started from. Raises `UserError`
    as `merge`, and for a run without adapters."""
    model, named = model_of(checkpoint), checkpoint.manifest.about.get("weights")
    if model.lora is None:
        raise UserError(f"{checkpoint.folder} has no adapters: its run trained all weights (checkpoint export)")
    if base is None and not isinstance(named, str):
        raise UserError(
            f"{checkpoint.folder}: its run started from random weights, which are in no folder: give --base"
        )
    weights = open_weights(base or Path(str(named)), model)
    return _merged(weights, model, checkpoint, folder, dtype, companions_of(checkpoint))


def _named_base(adapters: Path) -> Path:
    import json

    name = json.loads((adapters / CONFIG).read_bytes()).get("base_model_name_or_path")
    if not isinstance(name, str) or not Path(name).is_dir():
        raise UserError(f"{adapters / CONFIG} names {name!r}, which is no folder here: give the weights with --base")
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
