"""Flags from dataclasses: each field with an `Option` is a flag, its default and help in one place."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Any, get_args, get_origin

from shardwise.cli.quantities import length_of
from shardwise.options import Option, kinds


def add_flags(group: ArgumentParser | _ArgumentGroup, kind: type, *names: str, required: bool = False) -> None:
    """Add a flag for each of these fields of a dataclass. A flag that is not given is None in the namespace."""
    declared = {item.name: item for item in fields(kind)}
    for name in names:
        _add(group, declared[name], kinds(kind)[name], required)


def given(args: Namespace, kind: type) -> dict[str, Any]:
    """Field -> value of the flags that were given."""
    values = {item.name: getattr(args, item.name, None) for item in fields(kind) if "option" in item.metadata}
    return {name: _value(value) for name, value in values.items() if value is not None}


def _value(value: Any) -> Any:
    """A flag's value as its field has it: of a repeated one, a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _add(group: ArgumentParser | _ArgumentGroup, declared: Field[Any], kind: Any, required: bool) -> None:
    option: Option = declared.metadata["option"]
    name = declared.name.replace("_", "-")
    more: dict[str, Any] = {"dest": declared.name, "required": required, "help": option.help + _default(declared)}
    if option.const or kind is bool:
        flag = option.flag or (f"--no-{name}" if declared.default is True else f"--{name}")
        group.add_argument(flag, action="store_const", const=option.const or not declared.default, **more)
        return
    if get_origin(kind) is tuple:
        group.add_argument(f"--{name}", action="append", metavar=option.metavar, **more)
        return
    plain = next((item for item in get_args(kind) if item is not NoneType), kind)
    more |= {"choices": option.choices} if option.choices else {"metavar": option.metavar}
    read = length_of if option.tokens else plain if plain in (int, float) else str
    group.add_argument(option.flag or f"--{name}", type=read, **more)


def _default(declared: Field[Any]) -> str:
    """The default behind the help text, " (100)"."""
    option, value = declared.metadata["option"], declared.default
    if option.shown is not None or option.const or isinstance(value, bool) or value in (None, MISSING, "", ()):
        return f" ({option.shown})" if option.shown else ""
    return f" ({value:g})" if isinstance(value, (int, float)) else f" ({value})"
