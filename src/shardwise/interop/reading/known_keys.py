"""Which keys of other engines are known to be harmless: `keys.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple


class Known(NamedTuple):
    """Keys, and beginnings of keys."""

    keys: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()


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


def renamed(data: Mapping[str, Any], engine: str, table: str = "renamed") -> dict[str, Any]:
    """A table with the names that another engine's reader has for its keys; a dotted one is the key of a table."""
    result: dict[str, Any] = {key: dict(one) if isinstance(one, Mapping) else one for key, one in data.items()}
    for old, _, new in (pair.partition("=") for pair in rows(engine, table)["keys"].split()):
        place, _, key = old.rpartition(".")
        source = result.get(place) if place else result
        if isinstance(source, dict) and key in source:
            value = source.pop(key)
            place, _, key = new.rpartition(".")
            goal = result.setdefault(place, {}) if place else result
            if isinstance(goal, dict):
                goal.setdefault(key, value)
    return result
