"""Which keys of other engines are known to be harmless: `keys.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple


class Known(NamedTuple):
    """Keys, and beginnings of keys."""

    keys: frozenset[str]
    prefixes: tuple[str, ...]


@cache
def _file() -> dict[str, dict[str, dict[str, str]]]:
    return tomllib.loads((resources.files("shardwise.interop.reading") / "keys.toml").read_text(encoding="utf-8"))


def rows(engine: str, table: str) -> dict[str, str]:
    """One table of an engine. Raises `KeyError` for one that the file has not."""
    return _file()[engine][table]


def has(engine: str, table: str) -> bool:
    """Whether the file has that table of an engine."""
    return table in _file().get(engine, {})


@cache
def known(engine: str, table: str = "top") -> Known:
    """The keys of one table of an engine's configuration. Raises `KeyError` for one that the file has not."""
    found = rows(engine, table)
    return Known(frozenset(found.get("keys", "").split()), tuple(found.get("prefixes", "").split()))


def renamed(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A table with other names for its keys. names: old -> new; a dotted name is the key of a table in it."""
    result: dict[str, Any] = {key: dict(one) if isinstance(one, Mapping) else one for key, one in data.items()}
    for old, new in names.items():
        table, _, key = old.rpartition(".")
        source = result.get(table, {}) if table else result
        if not isinstance(source, dict) or key not in source:
            continue
        value = source.pop(key)
        table, _, key = new.rpartition(".")
        goal = result.setdefault(table, {}) if table else result
        if isinstance(goal, dict):
            goal.setdefault(key, value)
    return result
