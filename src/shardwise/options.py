"""Options declared once: a dataclass field holds the default, the limits, the help text and the command-line flag.

`check_fields` checks a whole configuration; `cli/declare.py` makes the options. Imports no other room.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from functools import cache
from itertools import groupby
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from shardwise.errors import UserError
from shardwise.records import dataclass

_WORDS: dict[Any, str] = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a text", Path: "a path", Mapping: "a dict",
    type(None): "None",
}  # fmt: skip


def length_in(text: str) -> int | None:
    """A number of tokens, sequences or clients: 8192, 8k, 1M; k is 1,024 and M its square, as contexts of models are
    named. None for another text."""
    match = re.fullmatch(r"(\d{1,12})([kKmM]?)", text.strip())
    return int(match[1]) * 1024 ** " km".index(match[2].lower() or " ") if match else None


_FEW, _LONGEST = 8, 10_000


def runs_text(numbers: Sequence[int]) -> str:
    """Numbers, of many their runs: 1/62x2/1 is a 1, 62 times a 2, and a 1."""
    if len(numbers) <= _FEW:
        return "/".join(map(str, numbers))
    runs = [(number, len(list(run))) for number, run in groupby(numbers)]
    return "/".join(f"{count}x{number}" if count > 1 else str(number) for number, count in runs)


def runs_in(text: str) -> tuple[int, ...]:
    """The numbers of a text such as 21/20/20/19 or 1/62x2/1. Raises `ValueError` for another one."""
    numbers: list[int] = []
    for word in text.split("/"):
        count, times, number = word.strip().rpartition("x")
        repeats = int(count) if times else 1
        if not 0 < repeats <= _LONGEST - len(numbers):
            raise ValueError(f"{repeats} of {number} are none or too many")
        numbers += [int(number)] * repeats
    return tuple(numbers)


@dataclass(frozen=True)
class Option:
    """Documentation and limits of one field of a configuration."""

    help: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    least: float | None = None
    """Smallest value; None for no limit."""
    most: float | None = None
    """Largest value; None for the largest finite number."""
    positive: bool = False
    """Whether the value must be above 0."""
    shown: str | None = None
    """The default in the help text, where it is not the value itself."""
    tokens: bool = False
    """Whether it is a number of tokens or sequences, which is also written as 8k or 1M (`cli/quantities.py`)."""
    flag: str = ""
    """Flag in place of `--field-name`, or of `--no-field-name` where the default is True."""
    const: str = ""
    """Value that the flag stores; empty for a flag that takes one."""

    def check(self, name: str, value: Any) -> None:
        """Raise `UserError` for a value outside the choices or limits; None is no value."""
        if value is None or isinstance(value, (bool, tuple)):
            return
        if self.choices and value not in self.choices:
            raise UserError(f"{name} must be one of {', '.join(self.choices)}, not {value!r}")
        if isinstance(value, (int, float)):
            self._check_number(name, value)

    def _check_number(self, name: str, value: float) -> None:
        most = sys.float_info.max if self.most is None else self.most
        if self.positive and not 0 < value <= most:
            limit = "" if self.most is None else f", at most {self.most:g}"
            raise UserError(f"{name} must be a positive number{limit}, not {value!r}")
        if self.least is not None and self.most is not None and isinstance(value, float):
            if not self.least <= value <= self.most:
                raise UserError(f"{name} must be between {self.least} and {self.most}, not {value!r}")
        elif self.least is not None and not value >= self.least:
            raise UserError(f"{name} must be at least {self.least:g}, not {value!r}")
        elif not value <= most:
            raise UserError(f"{name} must be at most {most}, not {value}")


def option(default: Any = MISSING, help: str = "", *, factory: Callable[[], Any] | None = None, **more: Any) -> Any:
    """A dataclass field with an `Option`. factory: makes a mutable default. more: fields of `Option`."""
    metadata = {"option": Option(help, **more)}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@cache
def kinds(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def check_fields(config: Any) -> None:
    """Raise `UserError` for a field of another type than it is declared with, or outside its limits."""
    of: Any = type(config)
    declared_kinds = kinds(of)
    for declared in fields(config):
        value = getattr(config, declared.name)
        check_type(declared.name, value, declared_kinds[declared.name])
        if "option" in declared.metadata:
            declared.metadata["option"].check(declared.name, value)


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raise `UserError` unless `value` is of `kind`: a class, a union of some, or a tuple of so many."""
    if not _is(value, kind):
        raise UserError(f"{name} must be {_in_words(kind)}, not {value!r}")


def _is(value: Any, kind: Any) -> bool:
    if kind is Any or get_origin(kind) in (Union, UnionType):
        return kind is Any or any(_is(value, item) for item in get_args(kind))
    if get_origin(kind) is Literal:
        return any(value is item or (isinstance(value, str) and value == item) for item in get_args(kind))
    if get_origin(kind) is tuple:
        items = get_args(kind)
        if items[1:] == (...,):
            return isinstance(value, tuple) and all(_is(item, items[0]) for item in value)
        return isinstance(value, tuple) and len(value) == len(items) and all(map(_is, value, items))
    if get_origin(kind) is Sequence:
        return isinstance(value, Sequence) and all(_is(item, get_args(kind)[0]) for item in value)
    if kind in (int, float):
        # True and False are no numbers here, though Python has them so.
        return not isinstance(value, bool) and isinstance(value, (int, kind)) and value == value  # no NaN
    return isinstance(value, get_origin(kind) or kind)


def _in_words(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(kind)))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return f"({', '.join('...' if item is ... else _in_words(item) for item in get_args(kind))})"
    kind = get_origin(kind) or kind
    return _WORDS.get(kind, f"of type {getattr(kind, '__name__', kind)}")
