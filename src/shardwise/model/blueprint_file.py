"""The file of a blueprint, as `shardwise trace` writes it."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import UserError, os_errors
from shardwise.model.blueprint import Blueprint
from shardwise.model.parameters import Model
from shardwise.small_files import read_small

FORMAT = "shardwise blueprint"
"""Value of the key `format` of such a file."""
MOST = 1 << 28
"""Bytes of the largest one that is read."""


def write_blueprint(blueprint: Blueprint, path: Path | str) -> None:
    """Write a blueprint as JSON. Raises `UserError` where it cannot be written."""
    blueprint = _moved(blueprint, lambda file: os.path.relpath(file, Path(path).resolve().parent))
    with os_errors(f"write {path}"):
        Path(path).write_text(json.dumps({"format": FORMAT, **blueprint.to_json()}) + "\n", encoding="utf-8")


def read_blueprint(path: str) -> Blueprint | None:
    """The blueprint of a file; None where it is no file of a blueprint. Raises `UserError` for a damaged one."""
    file = Path(path)
    if not path.endswith(".json") or not file.is_file():
        return None
    try:
        text = read_small(file, MOST)
        if f'"{FORMAT}"' not in text[:200]:
            return None
        data = json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    del data["format"]
    return _moved(Blueprint.from_json(data), lambda source: os.path.normpath(file.resolve().parent / source))


def configuration(model: Model | None) -> Mapping[str, Any] | None:
    """The config.json of a traced class of transformers; None for other models."""
    trace = model.trace if model else None
    return trace.source.config if trace and trace.source else None


def _moved(blueprint: Blueprint, path: Callable[[str], str]) -> Blueprint:
    """With another path of the code that was traced."""
    trace = blueprint.trace
    if trace is None or trace.source is None or not trace.source.file:
        return blueprint
    return replace(blueprint, trace=replace(trace, source=replace(trace.source, file=path(trace.source.file))))
