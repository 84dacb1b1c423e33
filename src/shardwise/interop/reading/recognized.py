"""The engine that an input is for, by evidence: the program that a command starts, else the keys that it has."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import chain
from typing import Any

from shardwise.errors import UserError, nearest
from shardwise.interop.spec import EngineSpec, specs


@cache
def engines() -> dict[str, EngineSpec]:
    """Name -> engine that is read; servers first."""
    return {one.name: one for one in sorted(specs().values(), key=lambda one: not one.serves)}


@cache
def unread() -> dict[str, EngineSpec]:
    """Name -> engine that is only recognized."""
    rows = tomllib.loads((resources.files("shardwise.interop.reading") / "unread.toml").read_text(encoding="utf-8"))
    marks = {name: frozenset(row.pop("marks", "").split()) for name, row in rows.items()}
    return {name: EngineSpec(name, name, marks=marks[name], **row) for name, row in rows.items()}


def program_of(words: Sequence[str]) -> tuple[str, int]:
    """(Engine, place of its first word) of the program that a command starts; an empty engine, and the place of the
    first script or module, where the program is no engine's."""
    programs = [(name, re.compile(one.program)) for name, one in (engines() | unread()).items() if one.program]
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
    given, every = set(keys), engines() | unread()
    scores = {}
    for name, one in every.items():
        marks = one.marks.union(*(every[base].marks for base in one.extends))
        scores[name] = len(marks & given), len(given & one.known().keys)
    best = [name for name, score in scores.items() if score == max(scores.values()) and score[0]]
    # A dialect without a key of its own there is its base.
    best = [name for name in best if not set(best) & set(every[name].extends)]
    return best[0] if len(best) == 1 else ""


def names(table: Mapping[str, Any]) -> set[str]:
    """Keys of a table, of its tables with theirs, such as model.tensor_model_parallel_size, and first parts of dotted
    ones."""
    result = {key.replace("-", "_") for key in table} | {key.partition(".")[0] for key in table}
    for key, value in table.items():
        if isinstance(value, Mapping):
            result |= {f"{key}.{inner}" for inner in value}
    return result


def unknown(words: Iterable[str], engine: str) -> UserError:
    """The error for an input that nothing here reads, with the engine's word that is nearest to one of its."""
    if engine:
        hint = "give the arguments or the file of the engine that it trains with, or say --engine"
        return UserError(f"this is {engine}'s configuration, which is not read here: {hint}")
    from difflib import SequenceMatcher

    programs = (re.findall(r"[a-z][\w-]{2,}[a-z]", one.program) for one in engines().values())
    known = {"torchrun", *engines(), *chain(*programs), *chain(*(one.marks for one in engines().values()))}
    others = [word for word in words if word.lstrip("-").replace("-", "_") not in known]
    near = [(word, found[0]) for word in others if (found := nearest(word, known, cutoff=0.8))]
    word, name = max(near, key=lambda pair: SequenceMatcher(None, *pair).ratio(), default=("", ""))
    hint = f"{word}: did you mean {name}? Else say" if word else "say"
    return UserError(f"no engine is recognized in this; {hint} which with --engine: {', '.join(engines())}")
