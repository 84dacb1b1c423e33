"""Axolotl's YAML as the Trainer's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.engines import transformers
from shardwise.interop.reading.fields import renamed
from shardwise.interop.reading.settings import FileReader, Reading
from shardwise.interop.spec import spec


def read(data: Mapping[str, Any], ranks: int | None, other: FileReader) -> Reading:
    """Layout of a file. Raises `UserError` as transformers'."""
    return transformers.read(trainer(data), ranks, other, spec("axolotl").title)


def trainer(data: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by transformers' names."""
    table = renamed(data, spec("axolotl").renamed)
    if table.get("bf16", "auto") == "auto" and not table.get("fp16"):
        table["bf16"] = True
    return table
