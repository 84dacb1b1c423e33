"""Which keys of other engines are known to be harmless: `keys.toml`."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import NamedTuple


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


@cache
def known(engine: str, table: str = "top") -> Known:
    """The keys of one table of an engine's configuration. Raises `KeyError` for one that the file has not."""
    found = rows(engine, table)
    return Known(frozenset(found.get("keys", "").split()), tuple(found.get("prefixes", "").split()))
