"""`LossConfig`: what a run minimizes, as a short text, and which data it needs. Imports no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardwise.errors import UserError, did_you_mean
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.model.shapes.reader import read_shapes

if TYPE_CHECKING:
    from shardwise.data.sources import Shape

KINDS = ("sft", "dpo", "distill")
_KEYS = {"sft": (), "dpo": ("beta",), "distill": ("teacher", "temperature")}


@dataclass(frozen=True)
class LossConfig:
    """A loss. Raises `UserError` for values that are none."""

    kind: Literal["sft", "dpo", "distill"] = "sft"
    """Cross-entropy of the tokens that count; direct preference optimization (Rafailov et al. 2023); the divergence
    from a second model's distribution (Hinton et al. 2015)."""
    beta: float = 0.1
    """Factor of DPO's log-ratios."""
    teacher: str = ""
    """Hugging Face folder of the second model."""
    temperature: float = 1.0
    """By which both models' logits are divided; the loss is multiplied by its square."""

    @classmethod
    def parse(cls, text: str) -> LossConfig:
        """The loss of a text such as `dpo,beta=0.2`. Raises `UserError`."""
        kind, *words = (word.strip() for word in text.split(","))
        if kind not in KINDS:
            raise UserError(f"loss: {did_you_mean(kind, KINDS, 'must be one of')}, not {kind!r}")
        values: dict[str, str | float] = {}
        for word in words:
            key, _, value = (part.strip() for part in word.partition("="))
            if key not in _KEYS[kind] or not value or key in values:
                keys = ", ".join(f"{name}=" for name in _KEYS[kind]) or "no keys"
                raise UserError(f"loss: {word!r}: {kind} has {keys}, each with one value")
            values[key] = value if key == "teacher" else _positive(key, value)
        if kind == "distill" and "teacher" not in values:
            raise UserError("loss: distill needs a second model: give distill,teacher=FOLDER")
        return cls(kind, **values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        usual = LossConfig()
        values = {key: getattr(self, key) for key in _KEYS[self.kind]}
        return ",".join([self.kind, *(f"{key}={v}" for key, v in values.items() if v != getattr(usual, key))])

    def check(self, shape: Shape, layout: Layout, model: ModelConfig, reports: bool) -> None:
        """Raise `UserError` for data, a layout or a model that does not go with the loss. shape: of the data."""
        if (self.kind == "dpo") != (shape == "pairs"):
            raise UserError(
                f"--loss {self.kind} does not train on "
                + ("preference pairs, which are for dpo" if shape == "pairs" else
                   "data without preference pairs: give records with prompt, chosen and rejected")
            )  # fmt: skip
        if shape != "text" and layout.independent > 1:
            raise UserError(
                f"sync={layout.sync}: replicas that train apart would each divide by their own answers' tokens: leave "
                "sync out for dialogues"
            )
        if self.kind == "distill":
            if reports:
                raise UserError("--report does not count the second model of --loss distill: leave it out")
            file = Path(self.teacher, "config.json")
            try:
                vocab = json.loads(file.read_text(encoding="utf-8"))
                vocab = vocab.get("text_config", vocab).get("vocab_size")
            except (OSError, ValueError, AttributeError):
                raise UserError(f"loss: {file} is not readable: teacher= is a folder with config.json and weights") from None
            if vocab != model.vocab:
                raise UserError(f"loss: the second model has {vocab} tokens, {model.name} has {model.vocab}: distillation "
                                "needs the same vocabulary")  # fmt: skip


def usual_loss(shape: Shape) -> LossConfig:
    """The loss of data of a shape."""
    return LossConfig("dpo" if shape == "pairs" else "sft")


def by_class(model: ModelConfig) -> ModelConfig:
    """The model by its class of transformers, which losses other than cross-entropy need."""
    from shardwise.model.huggingface import to_huggingface

    if model.counted is not None:
        return model
    plain = replace(model, lora=None)
    shaped = read_shapes(to_huggingface(plain), model.name, model.name, "its loss is computed by its class")
    return replace(shaped, lora=model.lora)


def _positive(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"loss: {key} must be a positive number, not {text!r}")
    return value
