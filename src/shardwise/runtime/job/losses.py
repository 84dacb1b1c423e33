"""`LossConfig`: what a run minimizes, as a short text, and which data it needs. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import UserError, did_you_mean
from shardwise.layout import Layout
from shardwise.layout.context import cuts_sequences
from shardwise.model import ModelConfig
from shardwise.options import check_fields, option

if TYPE_CHECKING:
    from shardwise.data.sources import Shape

_KEYS = {"sft": (), "dpo": ("beta",), "distill": ("teacher", "temperature")}


@dataclass(frozen=True)
class LossConfig:
    """A loss: cross-entropy of the tokens that count (sft), direct preference optimization (Rafailov et al. 2023), or
    the divergence from a second model (Hinton et al. 2015). Raises `UserError` for values that are none."""

    kind: str = "sft"
    beta: float = option(0.1, "factor of DPO's log-ratios", positive=True)
    teacher: str = option("", "Hugging Face folder of the second model")
    temperature: float = option(1.0, "by which both models' logits are divided", positive=True)

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def parse(cls, text: str) -> LossConfig:
        """The loss of a text such as `dpo,beta=0.2`; empty for sft. Raises `UserError`."""
        kind, *words = (word.strip() for word in (text or "sft").split(","))
        if kind not in _KEYS:
            raise UserError(f"there is no loss {kind!r}; {did_you_mean(kind, _KEYS, 'one of')}")
        values = dict(word.split("=", 1) for word in words if "=" in word)
        if (
            len(values) < len(words)
            or not values.keys() <= {*_KEYS[kind]}
            or (kind == "distill") > ("teacher" in values)
        ):
            keys = {"sft": "no keys", "dpo": "beta=", "distill": "teacher=FOLDER and temperature="}[kind]
            raise UserError(f"loss: {text!r}: {kind} has {keys}, as in dpo,beta=0.1 or distill,teacher=FOLDER")
        try:
            return cls(kind, **{key: value if key == "teacher" else float(value) for key, value in values.items()})  # type: ignore[arg-type]
        except ValueError:
            raise UserError(f"loss: {text!r}: its keys have numbers, as in dpo,beta=0.1") from None

    def check(self, shape: Shape, layout: Layout, model: ModelConfig, reports: bool) -> None:
        """Raise `UserError` for data, a layout or a model that does not go with the loss. shape: of the data."""
        if shape == "pairs" and self.kind != "dpo":
            raise UserError(f"--loss {self.kind} does not train on preference pairs, which are for dpo")
        if self.kind == "dpo" and shape != "pairs":
            raise UserError("--loss dpo needs preference pairs: records with prompt, chosen and rejected")
        if reports and self.kind == "distill":
            raise UserError("--report does not count the second model of --loss distill: leave it out")
        self.check_layout(layout, model, shape != "text")

    def check_layout(self, layout: Layout, model: ModelConfig, dialogues: bool) -> None:
        """Raise `UserError` for a layout or a model that does not go with the loss."""
        if dialogues and layout.independent > 1:
            raise UserError(
                "replicas that train apart would divide by the tokens of their answers: leave sync out for dialogues"
            )
        if self.kind != "sft" and cuts_sequences(layout):
            raise UserError(f"--loss {self.kind} is of whole rows, and cp cuts them: leave cp out")
        if self.kind != "distill":
            return
        file = Path(self.teacher, "config.json")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            vocab = data.get("text_config", data).get("vocab_size")
        except (OSError, ValueError, AttributeError):
            raise UserError(f"loss: {file} cannot be read: teacher= is a folder of a model") from None
        if vocab != model.vocab:
            raise UserError(f"loss: the second model has {vocab} tokens, {model.name} has {model.vocab}: distillation "
                            "needs equal vocabularies")  # fmt: skip


def by_class(model: ModelConfig) -> ModelConfig:
    """The model by its class of transformers, which losses other than cross-entropy need."""
    if model.counted is not None:
        return model
    from shardwise.model.huggingface import to_huggingface
    from shardwise.model.shapes.reader import read_shapes

    data = to_huggingface(replace(model, lora=None))
    return replace(read_shapes(data, model.name, model.name, "its class computes its loss"), lora=model.lora)
