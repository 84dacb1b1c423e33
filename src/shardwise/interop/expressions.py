"""Expressions and messages in engines' files: Python over the names of a layout and of a file's rows."""

import shlex
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any


class Names(dict[str, Any]):
    """Names of expressions: a dictionary, and the attributes of an object."""

    def __init__(self, source: object = None, /, **names: Any) -> None:
        super().__init__(names)
        self._source = source

    def __missing__(self, name: str) -> Any:
        try:
            return getattr(self._source, name)
        except AttributeError:
            raise KeyError(name) from None


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """Value of an expression. Raises `NameError` for a name that there is not."""
    return eval(_code(text), {"__builtins__": BUILTINS}, names)


def sentence(text: str, names: Mapping[str, Any]) -> str:
    """A message with its values, written as in an f-string. Raises `NameError` as `evaluate`."""
    return str(evaluate(f"f{text!r}", names))


@cache
def _code(text: str) -> CodeType:
    return compile(text, "an engine's file", "eval")


def schedule_chunks(schedule: str) -> int:
    """Chunks of a rank in a pipeline schedule."""
    # Brings numpy, which only a pipeline needs.
    from shardwise.schedule.pipeline import find

    return find(schedule).virtual


def nearest_multiples(number: int, of: int) -> str:
    """The multiples of `of` around a number that is none, in words."""
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)


BUILTINS: dict[str, Any] = {
    **{one.__name__: one for one in (bool, dict, int, isinstance, len, list, max, min, str)},
    **{one.__name__: one for one in (schedule_chunks, nearest_multiples)},
    "quote": shlex.quote,
    "newline": "\n",
}
"""Functions that every expression may call."""
