"""The engine that an input is for, by evidence: the program that a command starts, else the keys that it has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.reading.known_keys import has, known, rows

READ, UNREAD = (tuple(rows("recognized", "names")[key].split()) for key in ("read", "not_read"))
"""Engines that are read, and engines that are only recognized."""


def program_of(words: Sequence[str]) -> tuple[str, int]:
    """(Engine, place of its first word) of the program that a command starts; an empty engine, and the place of the
    first script or module, where the program is no engine's."""
    programs = [(engine, re.compile(pattern)) for engine, pattern in rows("recognized", "programs").items()]
    for place in reversed(range(len(words))):
        here = " ".join(words[place : place + 2])
        for engine, pattern in programs:
            if not here.startswith("-") and pattern.match(here):
                return engine, place
    for place, word in enumerate(words):
        if re.fullmatch(r"[\w./${}~-]+\.(?:py|sh)", word) or (place and words[place - 1] == "-m"):
            return "", place
    return "", 0


def engine_of(keys: Iterable[str]) -> str:
    """The engine that has most of these keys among its own; empty where there is none, or several."""
    given = set(keys)
    marks = {engine: set(text.split()) for engine, text in rows("recognized", "keys").items()}
    for engine, base in rows("recognized", "extends").items():
        marks[engine] |= {key for name in base.split() for key in marks[name]}
    scores = {engine: (len(names & given), _harmless(engine, given)) for engine, names in marks.items()}
    best = [engine for engine, score in scores.items() if score == max(scores.values()) and score[0]]
    # A dialect without a key of its own there is its base.
    best = [name for name in best if not set(best) & set(rows("recognized", "extends").get(name, "").split())]
    return best[0] if len(best) == 1 else ""


def _harmless(engine: str, given: set[str]) -> int:
    """Number of keys that an engine is known to have though they change no layout."""
    return sum(len(given & known(engine, table).keys) for table in ("top", "alone") if has(engine, table))


def names(table: Mapping[str, Any]) -> set[str]:
    """Keys of a table, of its tables with theirs, such as model.tensor_model_parallel_size, and first parts of dotted
    ones."""
    found = {key.replace("-", "_") for key in table} | {key.partition(".")[0] for key in table}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}" for inner in value}
    return found


def unknown(engine: str = "") -> UserError:
    """The error for an input that nothing here reads."""
    if engine:
        hint = "give the arguments or the file of the engine that it trains with, or say --engine"
        return UserError(f"this is {engine}'s configuration, which is not read here: {hint}")
    return UserError(f"no engine is recognized in this; say which with --engine: {', '.join(READ)}")
