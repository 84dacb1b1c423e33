"""`ConfigFields`: the keys of a configuration, taken one by one; what is left is either harmless or not known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from shardwise.errors import UserError, nearest
from shardwise.interop.reading.settings import Reading
from shardwise.layout import Layout

NOTHING = ("", "auto")
"""Words that say nothing: Hugging Face's trainer fills in what is "auto"."""
LAYOUT_WORDS = re.compile("parallel|degree|size|shard|stage|fsdp|zero|^[tpdce]p$", re.IGNORECASE)
"""Parts of names that say how a model is split, or how large something is."""
SPLITS = re.compile("parallel|degree", re.IGNORECASE)
"""Those that say how it is split wherever they are."""


class Known(NamedTuple):
    """Keys, and beginnings of keys, that change neither how a model is split nor what a rank keeps."""

    keys: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()


_SCALES = {letter: base**place for base, letters in ((1000, "kmgt"), (1024, "KMGT"))
           for place, letter in enumerate(letters, 1)}  # fmt: skip
NO_KEYS = Known()
KINDS = ("facts", "notes", "doubts", "unpriced")
"""Kinds of sentences about a configuration: see `ConfigFields.say`."""


class ConfigFields:
    """One table. harmless: keys that change no layout and no memory. where: the names of the tables that it
    is in. shown: how a key with these is written."""

    def __init__(
        self,
        table: Mapping[str, Any],
        harmless: Known = NO_KEYS,
        where: str = "",
        shown: Callable[[str], str] = str,
    ) -> None:
        self._table = dict(table)
        self._where = where
        self._harmless = harmless
        self._shown = shown
        self._taken: set[str] = set()
        self._inner: list[ConfigFields] = []
        self._within: dict[str, ConfigFields] = {}
        self.said: dict[str, list[str]] = {kind: [] for kind in KINDS}

    def say(self, kind: str, sentence: str) -> None:
        """Add a sentence for the outermost table: of `facts`, which a layout has no word for, of `notes`, which people
        trip over, of `doubts` about the layout, or that its memory is `unpriced`."""
        self.said[kind].append(sentence)

    def name(self, key: str) -> str:
        """A key as its user wrote it."""
        return self._shown(f"{self._where}{key}")

    def given(self, key: str) -> bool:
        """Whether there is a value; an empty one and "auto" are none."""
        self._taken.add(key)
        value = self._table.get(key)
        return value is not None and not (isinstance(value, str) and value.lower() in NOTHING)

    def automatic(self, key: str) -> bool:
        """Whether the value is left to a trainer that is not here."""
        return self._table.get(key) == "auto"

    def integer(self, key: str, default: int = 0, least: int = 1) -> int:
        """A number without a fraction, `default` where none is given. Raises `UserError` for another value, or less
        than `least`."""
        if not self.given(key):
            return default
        value = self._table[key]
        try:
            # bool is an int to Python; 5e8 is how people write large ones.
            number = int(float(value)) if not isinstance(value, bool) and float(value) == int(float(value)) else None
        except (TypeError, ValueError, OverflowError):
            number = None
        if isinstance(value, str) and value.startswith("$"):
            raise UserError(f"{self.name(key)} is {value}, a variable that nothing here sets: write its value")
        if number is None or number < least:
            raise UserError(f"{self.name(key)} must be an integer of at least {least}, not {_told(value)}")
        return number

    def number(self, key: str, default: float = 0.0) -> float:
        """A finite number. Raises `UserError` for another value."""
        if not self.given(key):
            return default
        try:
            value = float(self._table[key])
        except (TypeError, ValueError):
            value = float("nan")
        if not abs(value) < float("inf") or isinstance(self._table[key], bool):
            raise UserError(f"{self.name(key)} must be a number, not {_told(self._table[key])}")
        return value

    def size(self, key: str, default: int = 0) -> int:
        """A number of tokens or bytes, which vLLM also takes as 32k (1,000s) or 32K (1,024s). Raises as `integer`."""
        text = self.word(key)
        scale = _SCALES.get(text[-1:])
        if scale and text[:-1].replace(".", "", 1).isdigit():
            return round(float(text[:-1]) * scale)
        return self.integer(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false. Raises `UserError` for another value."""
        if not self.given(key):
            return default
        value = self._table[key]
        word = "" if isinstance(value, Mapping | list) else str(value).lower()
        if word not in ("true", "false", "yes", "no", "1", "0"):
            raise UserError(f"{self.name(key)} must be true or false, not {_told(value)}")
        return word in ("true", "yes", "1")

    def word(self, key: str, default: str = "", choices: Iterable[str] = ()) -> str:
        """A text; several words of a command line are one. Raises `UserError` for another value, and with the nearest
        choice where there are choices and it is none of them."""
        if not self.given(key):
            return default
        known = {choice.lower(): choice for choice in choices}
        value = self._table[key]
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            value = " ".join(value)
        if isinstance(value, Mapping | list):
            raise UserError(f"{self.name(key)} must be a text, not {_told(value)}")
        # YAML reads a bare no as false.
        value = "no" if value is False and "no" in known else str(value)
        if known and value.lower() not in known:
            near = nearest(value.lower(), known)
            hint = f"did you mean {known[near[0]]}?" if near else f"choices: {', '.join(known.values())}"
            raise UserError(f"{self.name(key)}={value} is unknown; {hint}")
        return value

    def table(self, key: str, harmless: Known = NO_KEYS) -> ConfigFields:
        """The table under a key, empty where there is none. Raises `UserError` where something else is there."""
        value = self._table.get(key) if self.given(key) else {}
        if not isinstance(value, Mapping):
            raise UserError(f"{self.name(key)} must be a table, not {_told(value)}")
        inner = ConfigFields(value, harmless, f"{self._where}{key}.", self._shown)
        self.join(inner)
        return inner

    def within(self, path: str, known: Callable[[str], Known]) -> ConfigFields:
        """The table under dotted keys. known: the harmless keys of a path. Raises `UserError` as `table`."""
        outer, _, key = path.rpartition(".")
        if path not in self._within:
            parent = self.within(outer, known) if outer else self
            self._within[path] = parent.table(key, known(path))
        return self._within[path]

    def join(self, inner: ConfigFields) -> None:
        """Take another table as one in this."""
        inner.said = self.said
        self._inner.append(inner)

    def value(self, key: str) -> Any:
        """A value as it is in the table; None where there is none."""
        return self._table.get(key)

    def reading(self, engine: str, layout: Layout, **said: Any) -> Reading:
        """The configuration as a whole, when all keys have been taken. said: further fields of `Reading`."""
        ignored, unknown, sizes, doubts = self.left()
        if sizes:
            self.say("facts", f"not counted, though named like sizes: {', '.join(sizes)}")
        facts, notes, unsettled, unpriced = (tuple(self.said[kind]) for kind in KINDS)
        unsettled += (*unpriced, *(f"{key} is not known here and may change this" for key in doubts))
        return Reading(
            engine, layout, **said, facts=facts, notes=notes, ignored=ignored, unknown=unknown, unsettled=unsettled,
            unpriced="; ".join(unpriced),
        )  # fmt: skip

    def around(self, inner: Reading, engine: str, **said: Any) -> Reading:
        """The reading of a file that this one names, inside it. said: fields of `Reading`."""
        self.said["facts"] += inner.facts
        self.said["notes"] += inner.notes
        outer = self.reading(engine, inner.layout, **{"optimizer": inner.optimizer} | said)
        keys = ("ignored", "unknown", "unsettled")
        lists: dict[str, Any] = {key: (*getattr(outer, key), *getattr(inner, key)) for key in keys}
        return replace(outer, **lists, unpriced=outer.unpriced or inner.unpriced)

    def left(self) -> tuple[tuple[str, ...], ...]:
        """(ignored, unknown, known but named like sizes, unknown and perhaps of the layout) keys of this table and of
        those in it."""
        lists: tuple[list[str], ...] = ([], [], [], [])
        ignored, unknown, sizes, doubts = lists
        for key, value in self._table.items():
            if key in self._taken:
                continue
            begun = [prefix for prefix in self._harmless.prefixes if key.startswith(prefix)]
            telling = LAYOUT_WORDS.search(key)
            if telling and (key in self._harmless.keys or any(map(LAYOUT_WORDS.search, begun))):
                sizes.append(self.name(key))
            elif not telling and (begun or key in self._harmless.keys):
                ignored.append(self.name(key))
                for one in _telling(value):
                    split = SPLITS.search(one)
                    for goal in (unknown, doubts) if split else (sizes,):
                        goal.append(f"{self.name(key)}.{one}")
            else:
                near = nearest(key, self._taken | self._harmless.keys, cutoff=0.75)
                meant = f" (did you mean {self.name(near[0]).removeprefix(self._where)}?)" if near else ""
                unknown.append(f"{self.name(key)}{meant}")
                # A name that is almost an option's is a mistyped one.
                if telling or nearest(key, self._taken, cutoff=0.85):
                    doubts.append(unknown[-1])
        for inner in self._inner:
            for mine, more in zip(lists, inner.left(), strict=True):
                mine += more
        return tuple(map(tuple, lists))


def renamed(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A table with other names of its keys. names: old -> new; a dotted one is the key of a table."""
    result: dict[str, Any] = {key: dict(one) if isinstance(one, Mapping) else one for key, one in data.items()}
    for old, new in names.items():
        place, _, key = old.rpartition(".")
        source = result.get(place) if place else result
        if isinstance(source, dict) and key in source:
            value = source.pop(key)
            place, _, key = new.rpartition(".")
            goal = result.setdefault(place, {}) if place else result
            if isinstance(goal, dict):
                goal.setdefault(key, value)
    return result


def _telling(value: Any, depth: int = 8) -> Iterator[str]:
    """Dotted keys inside a value that say how a model is split, or how large something is."""
    for key, inner in value.items() if isinstance(value, Mapping) and depth else ():
        if LAYOUT_WORDS.search(str(key)):
            yield str(key)
        yield from (f"{key}.{one}" for one in _telling(inner, depth - 1))


def _told(value: Any) -> str:
    """A value in a message: tables and lists may be long, and YAML's may hold themselves."""
    return "a table" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else repr(value)[:80]
