"""Result of a view's function: tables of columns with their units, and for each figure how it was computed."""

import base64
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Self

import numpy as np

from shardwise.report.strict_json import strict
from shardwise.report.time_parts import in_words

PACKED = 2048
"""Elements of an array from which on it travels as base64 of its little-endian bytes."""


def command_line(*words: object) -> str:
    """A `shardwise` command of these words, quoted for a shell."""
    return shlex.join(["shardwise", *map(str, words)])


def exact(value: float) -> str:
    """All digits of a number: 450 or 0.1."""
    return repr(float(value)).removesuffix(".0")


Columns = Mapping[str, tuple[str, Callable[[Any], Any]]]
"""Heading -> (unit, "" for text and plain numbers; value of an item)."""


@dataclass(frozen=True)
class Table:
    """title: what the rows are. columns: heading -> values, all equally long. units: heading -> bytes, seconds, share,
    count; headings that are left out are text or plain numbers."""

    title: str
    columns: Mapping[str, Sequence[Any]]
    units: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_rows(cls, title: str, units: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> Self:
        """A table of rows. units: heading -> unit, "" for text and plain numbers."""
        listed = list(rows)
        columns = {name: [row[i] for row in listed] for i, name in enumerate(units)}
        return cls(title, columns, {name: unit for name, unit in units.items() if unit})

    @classmethod
    def of(cls, title: str, items: Sequence[Any], columns: Columns) -> Self:
        values = {heading: [value(item) for item in items] for heading, (_, value) in columns.items()}
        return cls(title, values, {heading: unit for heading, (unit, _) in columns.items() if unit})

    @classmethod
    def of_parts(
        cls, title: str, heading: str, words: Mapping[str, str], items: Sequence[tuple[str, Mapping[str, float]]]
    ) -> Self:
        """Seconds by part. words: `time_parts.STEP` or `TOKEN`. items: (its name, below `heading`; part -> seconds)."""
        rows = [in_words(parts, words) for _, parts in items]
        shown = [word for word in words.values() if any(word in row for row in rows)]
        columns = {word: [row.get(word, 0.0) for row in rows] for word in shown}
        return cls(title, {heading: [name for name, _ in items], **columns}, dict.fromkeys(shown, "seconds"))

    def __post_init__(self) -> None:
        lengths = {len(values) for values in self.columns.values()}
        assert len(lengths) <= 1, f"{self.title}: columns of unequal length {lengths}"


@dataclass(frozen=True)
class How:
    """Explanation of a figure. steps: formulas with their numbers, one a line. command: gives the same on a command
    line. source: who published the formula or the constant."""

    steps: Sequence[str]
    command: str = ""
    source: str = ""


@dataclass(frozen=True)
class View:
    """One answer. state: every parameter with its value. choices: parameter -> what it could be. tables, how: by the
    name of the figure. more: what only the drawing needs."""

    state: Mapping[str, Any]
    choices: Mapping[str, Sequence[Any]]
    tables: Mapping[str, Table]
    how: Mapping[str, How]
    more: Mapping[str, Any] = field(default_factory=dict)


def encode(value: Any) -> bytes:
    """JSON as the page reads it: long arrays as `{"packed": "f8", "base64": ...}`, NaN as text."""
    return json.dumps(strict(_plain(value)), allow_nan=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        if value.size < PACKED:
            return value.tolist()
        little = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
        return {"packed": little.dtype.str[1:], "base64": base64.b64encode(little.tobytes()).decode()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
