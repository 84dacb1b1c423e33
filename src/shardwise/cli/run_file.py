"""`--config FILE.toml`: options of a command from a file, under the names of the flags. Flags take their place."""

from __future__ import annotations

import argparse
import copy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import UserError, did_you_mean, os_errors
from shardwise.model import ModelConfig
from shardwise.options import check_type, kinds
from shardwise.small_files import read_small

_NEVER = ("help", "json", "traceback", "config")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add --config."""
    help = "options from a TOML file, such as a run's run.toml: seq = 64; flags override it"
    parser.add_argument("--config", metavar="FILE", help=help)


def parsed(parser: argparse.ArgumentParser, argv: list[str], more: type | None = None) -> argparse.Namespace:
    """The arguments of a command line, and of the file that its --config names.

    more: a dataclass whose fields without a flag a file may have, too. A table `model` is a `ModelConfig`. Raises
    `UserError` for a file that cannot be read, for an unknown key, with the nearest one, and for a wrong value.
    """
    given = _given(parser, argv)
    if "config" not in given:
        return parser.parse_args(argv)
    path = Path(given["config"])
    try:
        words, lists, extra = _words(parser, _read(path), given, more)
        _given(parser, [*words, *lists])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    args = parser.parse_args([*words, *argv, *lists])
    for name, value in extra.items():
        setattr(args, name, value)
    return args


def _given(parser: argparse.ArgumentParser, argv: list[str]) -> dict[str, Any]:
    """What a command line names itself: nothing is required, and there are no defaults."""
    lenient = copy.deepcopy(parser)
    for action in lenient._actions:
        action.default, action.required = argparse.SUPPRESS, False
        if not action.option_strings and action.nargs is None:
            action.nargs = "?"
    return vars(lenient.parse_args(argv))


def _read(path: Path) -> dict[str, Any]:
    with os_errors("read it"):
        text = read_small(path)
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise UserError(f"not valid TOML: {error}") from None


def _words(
    parser: argparse.ArgumentParser, values: dict[str, Any], given: dict[str, Any], more: type | None
) -> tuple[list[str], list[str], dict[str, Any]]:
    """(words of a command line, words of options that take all words behind them, values without a flag) of a file,
    without what is given."""
    actions = {action.dest: action for action in parser._actions if action.dest not in _NEVER}
    types = {name: kind for name, kind in kinds(more).items() if name not in actions} if more else {}
    words: list[str] = []
    lists: list[str] = []
    extra: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in types:
            extra[name] = tuple(value) if isinstance(value, list) else value
            check_type(key, extra[name], types[name])
        elif name not in actions:
            raise UserError(f"unknown key {key!r}; {did_you_mean(name, [*actions, *types], 'keys:')}")
        elif name == "model" and isinstance(value, dict):
            if name not in given:
                extra[name] = ModelConfig.from_json(_lists_as_tuples(value))
        elif name not in given:
            greedy = bool(actions[name].option_strings) and actions[name].nargs in ("*", "+")
            (lists if greedy else words).extend(_of(actions[name], key, value))
    return words, lists, extra


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
    several = isinstance(action, argparse._AppendAction) or action.nargs in ("*", "+")
    if isinstance(value, list) and not several:
        raise UserError(f"{key} must be one value, not a list")
    texts = [str(item) for item in (value if isinstance(value, list) else [value])]
    if not action.option_strings:
        yield from texts
    elif isinstance(action, argparse._AppendAction):
        yield from (f"{action.option_strings[-1]}={text}" for text in texts)
    elif several:
        yield from (action.option_strings[-1], *texts)
    else:
        yield f"{action.option_strings[-1]}={texts[0]}"


def _lists_as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lists_as_tuples(item) for name, item in value.items()}
    return tuple(map(_lists_as_tuples, value)) if isinstance(value, list) else value
