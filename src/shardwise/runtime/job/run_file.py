"""`run.toml`: a training run as the file that `shardwise train --config` reads, so that it can be repeated."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from shardwise.layout import Workload
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog
from shardwise.runtime.job.config import OptimizerConfig, TrainConfig

NAME = "run.toml"

_PATHS = ("data", "tokenizer", "weights", "adapters", "resume", "offload_dir")
_OWN = (
    "model", "workload", "optimizer", "out", "schedule_steps", "corpus", "corpus_fingerprint", "former_corpus",
    "restart", "adapters",
)  # fmt: skip
"""Fields that are written otherwise, or that the run alone has. Without `out`, a repeated run gets a directory."""
_TEXT = ("data", "text_field", "max_bytes", "tokenizer")


def run_file(config: TrainConfig) -> str:
    """The file's text: what differs from the defaults, under the names of the flags. Paths are absolute."""
    values = {name: _absolute(name, value) for name, value in _changed(config).items() if name not in _OWN}
    values["layout"] = str(config.layout)
    lines = ["# shardwise train --config FILE repeats this run; flags take the place of what is here."]
    if config.resume:
        return "\n".join([*lines, *_assignments(_resumed(config))]) + "\n"
    values |= _changed(config.workload) | _changed(config.optimizer)
    model = config.model.replace(lora=None)
    if config.adapters is not None:
        values["lora"] = _absolute("adapters", config.adapters)
    elif config.model.lora:
        values["lora"] = str(config.model.lora)
    if catalog().get(model.name) == model:
        return "\n".join([*lines, *_assignments({"model": model.name} | values)]) + "\n"
    return "\n".join([*lines, *_assignments(values), "", "[model]", *_assignments(_described(model))]) + "\n"


def _resumed(config: TrainConfig) -> dict[str, Any]:
    """What a resumed run may have of its own. The rest is the checkpoint's, as are the defaults."""
    without = {*_OWN, "weights", *(() if config.former_corpus else _TEXT)}
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in without}
    present = {name: _absolute(name, value) for name, value in values.items() if value not in (None, ())}
    return present | {"layout": str(config.layout)}


def _changed(config: TrainConfig | Workload | OptimizerConfig) -> dict[str, Any]:
    """Fields that are not their defaults."""
    values = {}
    for field in fields(config):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if (value := getattr(config, field.name)) != default:
            values[field.name] = value
    return values


def _described(model: ModelConfig) -> dict[str, Any]:
    return {name: value for name, value in model.to_json().items() if value is not None}


def _absolute(name: str, value: Any) -> Any:
    """A path that is there, from the root; "stdlib" is none."""
    return str(Path(value).resolve()) if name in _PATHS and os.path.exists(value) else value  # noqa: PTH110


def _assignments(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in values.items()]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {_toml(item)}' for name, item in value.items() if item is not None)} }}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)
