"""Tables of tests' cases, as data: `cases.toml` in the folder of a test has a table of its file's and its own name.

What TOML cannot say is an expression of Python, of a test with the names of its file: `{ python = "None" }`.
"""

import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])


@cache
def _tables(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "cases.toml").read_text(encoding="utf-8"))


def _value(given: Any, known: dict[str, Any]) -> Any:
    if isinstance(given, list):
        return [_value(each, known) for each in given]
    if isinstance(given, dict):
        values = {name: _value(each, known) for name, each in given.items()}
        return eval(values["python"], known) if values.keys() == {"python"} else values
    return given


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def table(file: str, name: str) -> Any:
    """A table of a test's file by its name; lists are tuples."""
    return _frozen(_value(_tables(Path(file).parent)[Path(file).stem][name], {}))


def from_table(test: Test) -> Test:
    file = Path(test.__code__.co_filename)
    found = _tables(file.parent)[file.stem][test.__name__]
    return pytest.mark.parametrize(found["names"], _value(found["rows"], test.__globals__))(test)
