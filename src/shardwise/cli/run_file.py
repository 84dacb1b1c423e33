"""`--config FILE.toml`: options of a command from a file, under the names of the flags. Flags take their place."""

import argparse
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwise.cli.declare import CommandOptions, Parser, arg, command_of, declared, is_required, parser_of
from shardwise.errors import UserError, did_you_mean, os_errors
from shardwise.model import ModelConfig
from shardwise.options import check_type, kinds
from shardwise.records import dataclass
from shardwise.small_files import read_small

_NEVER = ("help", "json", "traceback", "config")


@dataclass
class ConfigOptions(CommandOptions):
    """Options from a file."""

    config: str | None = arg("options from a TOML file, such as a run's run.toml: seq = 64; flags override it", "FILE")


def values_of(name: str, argv: list[str]) -> dict[str, Any]:
    """The values of a command's line, and of the file that its --config names, in which `FILE_KEYS` of the command has
    keys without a flag. A table `model` is a `ModelConfig`.

    Raises `UserError` for a file that cannot be read, an unknown key, with the nearest one, and a wrong value.
    """
    parser, module = parser_of(name, lenient=True), import_module(f"shardwise.cli.{name}")
    given = vars(parser.parse_args(argv))
    path = Path(given["config"])
    try:
        with os_errors("read it", typed=path, damaged="not valid TOML:"):
            data = tomllib.loads(read_small(path))
        values = _values(parser, data, given, getattr(module, "FILE_KEYS", None))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    values |= given
    items = declared(command_of(name)[0]).values()
    missing = [item.flag for item in items if is_required(item) and item.name not in values]
    if missing:
        parser_of(name).error(f"the following arguments are required: {', '.join(missing)}")
    return values


def _values(parser: Parser, table: dict[str, Any], given: dict[str, Any], more: type | None) -> dict[str, Any]:
    """The values of a file that are not given. more: a dataclass whose fields without a flag are keys, too."""
    actions = {action.dest: action for action in parser._actions if action.dest not in _NEVER}
    types = {name: kind for name, kind in kinds(more).items() if name not in actions} if more else {}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in types:
            values[name] = tuple(value) if isinstance(value, list) else value
            check_type(key, values[name], types[name])
        elif name not in actions:
            raise UserError(f"unknown key {key!r}; {did_you_mean(name, [*actions, *types], 'keys:')}")
        elif name in given:
            continue
        elif name == "model" and isinstance(value, dict):
            values[name] = ModelConfig.from_json(_lists_as_tuples(value))
        else:
            values |= vars(parser.parse_args(list(_of(actions[name], key, value))))
    return values


def _of(action: argparse.Action, key: str, value: Any) -> Iterator[str]:
    """An option as words of a command line."""
    if isinstance(value, dict):
        raise UserError(f"{key} must be a value, not a table")
    if action.nargs == 0:
        stored = action.const if action.const is not None else True
        wanted = not stored if isinstance(stored, bool) and value is not stored else stored
        if value != wanted or isinstance(value, bool) != isinstance(stored, bool):
            raise UserError(
                f"{key} must be {'true or false' if isinstance(stored, bool) else repr(stored)}, not {value!r}"
            )
        if value == stored:
            yield action.option_strings[-1]
        return
    greedy = action.nargs in ("*", "+")
    if isinstance(value, list) and not (greedy or isinstance(action, argparse._AppendAction)):
        raise UserError(f"{key} must be one value, not a list")
    texts = [str(item) for item in (value if isinstance(value, list) else [value])]
    if greedy or not action.option_strings:
        yield from (*action.option_strings[-1:], *texts)
    else:
        yield from (f"{action.option_strings[-1]}={text}" for text in texts)


def _lists_as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lists_as_tuples(item) for name, item in value.items()}
    return tuple(map(_lists_as_tuples, value)) if isinstance(value, list) else value
