"""Commands as functions of Python: `explain`, `emit` and `generate`, with the options of their declarations.

Names, types, defaults and limits are those of the command line. A model, a layout or a cluster may be an object or a
text, a layout also a dict. A result prints as the command does, and its fields are those of --json.
"""

from __future__ import annotations

import inspect
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from shardwise.cli.declare import HIDDEN, CommandOptions, command_of, declared, is_required, options_of, typed
from shardwise.cli.output import collected
from shardwise.cluster import Cluster
from shardwise.errors import UserError, did_you_mean
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.options import check_type
from shardwise.report.printing import Printable
from shardwise.report.terminal import Renderable


class CommandResult(Printable):
    """The result of a command. Its fields are those of --json: `result["layout"]`."""

    __slots__ = ("data", "shown")

    def __init__(self, data: Mapping[str, Any], shown: tuple[Renderable, ...]) -> None:
        self.data, self.shown = dict(data), shown

    def __getitem__(self, name: str) -> Any:
        return self.data[name]

    def keys(self) -> list[str]:
        """Names of the fields."""
        return list(self.data)

    @property
    def text(self) -> str:
        """The file that `emit` writes, or the first answer of `generate`."""
        return str(self.data["text"] if "text" in self.data else self.data["answers"][0]["text"])

    def to_json(self) -> dict[str, Any]:
        return self.data

    def tables(self) -> Iterator[Renderable]:
        yield from self.shown or [self.text]

    def conclusion(self) -> str:
        first = next((one for one in self.tables() if isinstance(one, str) and one.strip()), "")
        return first.strip().splitlines()[0] if first else ", ".join(self.keys())


def _function(name: str, first: str) -> Callable[..., CommandResult]:
    """A command's function. first: the argument that is given without its name."""

    def call(*args: Any, **options: Any) -> CommandResult:
        kind, run = command_of(name)
        items = {key: item for key, item in declared(kind).items() if item.option.help is not HIDDEN}
        order = [first, *(key for key in ("layout", "cluster") if key in items)]
        if len(args) > len(order):
            raise UserError(f"{name} takes {', '.join(order)} without their names; name the others")
        values = dict(zip(order, args, strict=False)) | {"json": True} | options
        for key in values:
            if key not in items:
                raise UserError(f"{name} has no option {key!r}; {did_you_mean(key, items, 'options:')}")
        missing = [key for key, item in items.items() if is_required(item) and values.get(key) is None]
        if missing:
            raise UserError(f"{name} needs {', '.join(missing)}")
        read = {key: _value(items[key], value) for key, value in values.items() if value is not None}
        with collected() as results:
            run(options_of(kind, read))
        return CommandResult(*results[-1])

    call.__name__ = call.__qualname__ = name
    call.__module__ = __name__
    return call


def _value(item: Any, value: Any) -> Any:
    """A value as the command line would read it. Raises `UserError`."""
    if item.name == "layout" and isinstance(value, (Layout, Mapping)):
        return str(Layout.of(value))
    if isinstance(value, {"cluster": Cluster, "model": ModelConfig}.get(item.name, ())):
        return value
    form = typed(item)
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    several = form.get("action") == "append" or form.get("nargs") in ("+", "*")
    if several and not isinstance(value, (list, tuple)):
        value = (value,)
    if isinstance(value, str) and form.get("type", str) is not str:
        try:
            value = form["type"](value)
        except (ValueError, ArgumentTypeError) as error:
            raise UserError(f"{item.name}={value!r}: {error}") from None
    if "choices" in form and value not in form["choices"]:
        raise UserError(f"{item.name}={value!r}: {did_you_mean(str(value), form['choices'], 'one of')}")
    value = tuple(value) if several else value
    check_type(item.name, value, item.kind)
    return value


explain = _function("explain", "config")
emit = _function("emit", "model")
generate = _function("generate", "model")


def _describe(function: Callable[..., CommandResult], first: str) -> None:
    """Signature and documentation from the declarations, for `help` and completion."""
    kind, _ = command_of(function.__name__)
    items = {key: item for key, item in declared(kind).items() if item.option.help is not HIDDEN}
    order = [first, *(key for key in ("layout", "cluster") if key in items)]
    rest = [key for key in items if key not in order and key not in declared(CommandOptions)]
    where, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    fields_here = {item.name for item in fields(kind)}  # a borrowed option is None where it is not given
    defaults = {key: items[key].default if key in fields_here else None for key in rest}
    parameters = [
        inspect.Parameter(first, where, annotation=Any),
        *(inspect.Parameter(key, where, default=None, annotation=Any) for key in order[1:]),
        *(inspect.Parameter(key, named, default=value, annotation=items[key].kind) for key, value in defaults.items()),
    ]
    function.__signature__ = inspect.Signature(parameters, return_annotation=CommandResult)  # type: ignore[attr-defined]
    lines = (f"{key}: {items[key].option.help}" for key in (*order, *rest))
    summary = inspect.getdoc(inspect.getmodule(command_of(function.__name__)[1])) or ""
    function.__doc__ = "\n".join([summary, "", *lines])


for _each, _first in ((explain, "config"), (emit, "model"), (generate, "model")):
    _describe(_each, _first)
