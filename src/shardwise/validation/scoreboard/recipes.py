"""Settings of published runs that their tables leave to the recipes of the software's release (`recipes.toml`)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from shardwise.errors import UserError
from shardwise.validation.scoreboard.configuration import Row

CONTAINER = re.compile(r"(\d\d\.\d\d(?:\.\d\d)?) NeMo Container")
"""Release of the software in a row's source or notes."""


@cache
def releases() -> dict[str, Any]:
    """The table of the package: release -> `source` and `runs`."""
    text = (resources.files("shardwise.validation.scoreboard") / "recipes.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


SCOPES = ("attention", "router", "experts")
"""What CUDA graphs can hold of a block with experts."""

ENGINES = {"tokens": "megatron-bridge", "rows": "megatron-bridge-alltoall"}
"""How a recipe has tokens exchanged -> the engine profile."""


def recipe_of(row: Row, device: str, narrow: bool) -> tuple[str, Mapping[str, Any]] | None:
    """(the engine profile, its fields that differ in this run), None where no recipe is known. narrow: whether products
    take less than 16 bits. What a row states itself counts first. Raises `UserError` for a setting that is none."""
    if row.get("exchange") is not None:
        return _settings(row)
    release = CONTAINER.search(f"{row.get('source')} {row.get('notes')}")
    if release is None:
        return None
    for run in _runs(release[1]):
        named = str(row.get("model")).startswith(run["model"]) and device.split("-")[0] in run["devices"]
        if named and run.get("narrow", narrow) == narrow:
            return _settings(run)
    return None


def _settings(run: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    exchange, captured = run["exchange"], run.get("captured") or []
    if exchange not in list(ENGINES):
        raise UserError(f"exchange must be one of {', '.join(ENGINES)}, not {exchange!r}")
    if not isinstance(captured, list) or not all(scope in SCOPES for scope in captured):
        raise UserError(f"captured must be a list of {', '.join(SCOPES)}, not {captured!r}")
    return ENGINES[exchange], {
        "exchange_overlap": bool(run.get("overlap")),
        "captured": tuple(captured),
        "fused_experts": bool(run.get("fused")),
    }


def _runs(release: str) -> Iterator[Mapping[str, Any]]:
    """Runs of a release, then of those before it, the latest first."""
    for name, table in sorted(releases().items(), reverse=True):
        if name <= release:
            yield from table["runs"]
