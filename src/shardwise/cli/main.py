"""`shardwise COMMAND ...`: finds the command, and turns every way it can end into one line and an exit code.

0 success, 1 a dead rank or a defect, 2 a user's mistake, 128 + the number of a signal that ended it. Results go to
standard output, everything else to standard error. With --json an error is on standard output, too, as one JSON object.

A command is a module of this room named like it, with `add_arguments(parser)` and, unless it has actions,
`run(args) -> exit code`; its docstring is its help.
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from shardwise.cli.actions import FLAGS, Run
from shardwise.cli.commands import COMMANDS, overview
from shardwise.errors import DivergedError, UserError, did_you_mean, file_limit

NEW_OBJECTS = 20_000
"""New objects after which the interpreter looks for garbage: modules that are loaded have many, and none is garbage."""


class _Formatter(argparse.HelpFormatter):
    """Keeps paragraphs apart, and commands as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return "\n\n".join(
            part if part.startswith("shardwise ") else super(_Formatter, self)._fill_text(part, width, indent)
            for part in text.strip().split("\n\n")
        )


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`s, and name the option that is near one that it does not have."""

    def error(self, message: str) -> NoReturn:
        first = message.removeprefix("unrecognized arguments: ").split(maxsplit=1)[0].partition("=")[0]
        if message.startswith("unrecognized") and first.startswith("-"):
            hint = did_you_mean(first, self._options(), "")
            message += f"; {hint}" if hint.endswith("?") else ""
        raise UserError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), names, "one of")
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {hint}")

    def _options(self) -> list[str]:
        """Its options, and those of its actions."""
        nested = (each for each in self._actions if isinstance(each, argparse._SubParsersAction))
        parsers = [self, *(parser for each in nested for parser in each.choices.values())]
        return sorted({option for parser in parsers for option in parser._option_string_actions})


def main(argv: list[str] | None = None) -> int:
    """Run one command line. Returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    gc.set_threshold(NEW_OBJECTS)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a bar should show a question mark, not an exception.
        with suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0
    except UserError as error:
        return _fail(argv, str(error), 2)
    except KeyboardInterrupt as error:
        # The user's own interrupt: no error.
        return _end(argv, str(error) or "interrupted", getattr(error, "exit_code", 130))
    except BrokenPipeError:
        # Whoever read us has left; the interpreter must not complain about it either when it flushes.
        _drop_output()
        return 141
    except OSError as error:
        if not (_output_refused() or error.errno in _NO_ROOM):
            return _unexpected(argv, error)
        return _fail(argv, f"cannot write{f' to {error.filename}' if error.filename else ''}: {error.strerror}", 2)
    except Exception as error:
        return _unexpected(argv, error)


def _fail(argv: list[str], line: str, code: int) -> int:
    return _end(argv, line, code, "error: ")


def _end(argv: list[str], line: str, code: int, prefix: str = "") -> int:
    """Say in one line how the command ended, with --json as one object on standard output, too. Returns `code`."""
    line = " ".join(line.split())
    print(f"shardwise: {prefix}{line}", file=sys.stderr)
    if "--json" in argv[: argv.index("--")] if "--" in argv else "--json" in argv:
        import json

        try:
            print(json.dumps({"error": line, "exit_code": code}), flush=True)
        except OSError:
            _drop_output()
    return code


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _output_refused() -> bool:
    """Whether standard output refuses what it still has to take, which then is dropped."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
        return True
    return False


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unexpected(argv: list[str], error: Exception) -> int:
    from shardwise.runtime.job.launch import DIVERGED, RunFailed

    if line := file_limit(error):
        return _fail(argv, line, 2)
    if isinstance(error, DivergedError):
        return _fail(argv, str(error), DIVERGED)
    if isinstance(error, RunFailed):
        return _fail(argv, str(error), 1)
    if "--traceback" in argv:
        import traceback

        traceback.print_exc()
    return _fail(argv, f"{type(error).__name__}: {error}; this is a bug in shardwise, --traceback shows where", 1)


def _dispatch(argv: list[str]) -> int:
    if sys.stdout is None:
        # Closed: the next file that is opened would get its number, and what ranks write there.
        raise UserError("standard output is closed: send it to /dev/null if it is not needed")
    while argv and argv[0] == "--traceback":
        argv = argv[1:]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        from shardwise import __version__

        print(f"shardwise {__version__}")
        return 0
    name, *rest = FORMER_ACTIONS.get(" ".join(argv[:2]), argv[:2]) + argv[2:]
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise UserError(f"unknown {kind} {name!r}; {did_you_mean(name, COMMANDS, 'commands:')}")
    args = _arguments(name, rest)
    run: Run = args.run if "run" in args else import_module(f"shardwise.cli.{name}").run
    return run(args)


FORMER = {
    "checkpoint": {"--to": "--out"},
    "collective": {"--frames": "--out"},
    "generate": {"--max-tokens": "--max-new-tokens"},
    "studio": {"--export": "--out"},
}
"""Command -> former names of options, which are still accepted and which no help text shows."""
FORMER_ACTIONS = {"collective list": ["list", "algorithms"], "pipeline list": ["list", "schedules"]}


def _arguments(name: str, argv: list[str]) -> argparse.Namespace:
    """The arguments of a command, those of a file included."""
    parser, former = parser_of(name), FORMER.get(name, {})
    argv = [former.get(flag, flag) + equals + value for flag, equals, value in (word.partition("=") for word in argv)]
    if not any(word.partition("=")[0] == "--config" for word in argv):
        return parser.parse_args(argv)
    from shardwise.cli.run_file import parsed

    return parsed(parser, argv, getattr(import_module(f"shardwise.cli.{name}"), "FILE_KEYS", None))


def parser_of(name: str) -> Parser:
    """The parser of one of `COMMANDS`."""
    from shardwise.cli.examples import EXAMPLES, broken

    command = import_module(f"shardwise.cli.{name}")
    examples = "\n\n".join(map(broken, EXAMPLES[name]))
    parser = Parser(
        prog=f"shardwise {name}", description=command.__doc__, epilog=f"examples:\n{examples}", allow_abbrev=False,
        formatter_class=_Formatter,
    )  # fmt: skip
    command.add_arguments(parser)
    for flag, text in FLAGS.items():
        parser.add_argument(flag, action="store_true", help=text)
    return parser
