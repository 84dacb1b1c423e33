"""`shardwise COMMAND ...`: finds the command, and turns every way it can end into one line and an exit code.

0 success, 1 a dead rank or a defect, 2 a user's mistake, 128 + the number of a signal that ended it. Results go to
standard output, everything else to standard error. With --json an error is on standard output, too, as one JSON object.

A command is a module of this package named like it, with `NameOptions` (a `declare.CommandOptions`) and
`run(options) -> exit code`, or with `ACTIONS`: name -> both, or a class with `run`. Its docstring is its help.
"""

import errno
import gc
import os
import sys
from contextlib import suppress

from shardwise import __version__
from shardwise.cli.commands import COMMANDS, overview
from shardwise.errors import DivergedError, UserError, did_you_mean, file_limit

NEW_OBJECTS = 20_000
"""New objects after which the interpreter looks for garbage: modules that are loaded have many, and none is garbage."""


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
    if isinstance(error, ModuleNotFoundError | AttributeError):
        # What Python has on Linux alone.
        module = getattr(getattr(error, "obj", None), "__name__", "")
        if error.name in ("fcntl", "resource") or module in ("os", "signal"):
            missing = f"{module}.{error.name}".lstrip(".")
            line = f"needs Linux: no {missing} here; plan, estimate, explain, emit and list work without it"
            return _fail(argv, f"{' '.join(argv[:1])} {line}", 2)
    if line := file_limit(error):
        return _fail(argv, line, 2)
    if isinstance(error, DivergedError):
        from shardwise.runtime.job.launch import DIVERGED

        return _fail(argv, str(error), DIVERGED)
    launch = sys.modules.get("shardwise.runtime.job.launch")
    if launch and isinstance(error, launch.RunFailed):
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
        print(f"shardwise {__version__}")
        return 0
    name, *rest = FORMER_ACTIONS.get(" ".join(argv[:2]), argv[:2]) + argv[2:]
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise UserError(f"unknown {kind} {name!r}; {did_you_mean(name, COMMANDS, 'commands:')}")
    return _run(name, rest)


FORMER = {
    "checkpoint": {"--to": "--out"},
    "collective": {"--frames": "--out"},
    "generate": {"--max-tokens": "--max-new-tokens", "--pretend": "--emulate"},
    "pipeline": {"--pretend": "--emulate"},
    "studio": {"--export": "--out"},
}
"""CommandOptions -> former names of options, which are still accepted and which no help text shows."""
FORMER_ACTIONS = {
    "collective list": ["list", "algorithms"], "pipeline list": ["list", "schedules"],
    "list gpus": ["list", "devices"], "list gpu": ["list", "devices"],
}  # fmt: skip


def _run(name: str, argv: list[str]) -> int:
    """Run a command, or its action, with the options of a command line and of the file that --config names."""
    from shardwise.cli.declare import read

    former = FORMER.get(name, {})
    argv = [former.get(flag, flag) + equals + value for flag, equals, value in (word.partition("=") for word in argv)]
    options, run = read(name, argv)
    return run(options)
