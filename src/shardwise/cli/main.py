"""`shardwise COMMAND ...`: finds the command, and turns every way it can end into one line and an exit code.

0 success, 1 a dead rank or a defect, 2 a user's mistake, 128 + the number of a signal that ended it. Results go to
standard output, everything else to standard error.

A command is a module of this room named like it, with `add_arguments(parser)` and, unless it has actions,
`run(args) -> exit code`; its docstring is its help.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from shardwise.cli.actions import FLAGS, Run
from shardwise.errors import UserError, did_you_mean

COMMANDS = {
    "plan": "the best ways to train a model on a cluster, and why",
    "estimate": "bytes by class and the ledger of one training step, before anything runs",
    "train": "train a model, split over processes, on text",
    "generate": "continue prompts with a model that is split over processes; what each token moved",
    "serve": "answer OpenAI's clients over HTTP with a model that is split over processes",
    "verify": "a module of your own, split, against the same module on one device",
    "trace": "a module of your own, described for estimate and plan",
    "compare": "two step reports against each other, or one run's prediction against its measurement",
    "checkpoint": "inspect, verify, reshard, diff, export or import checkpoints",
    "collective": "algorithms of collectives: show, verify, price, measure",
    "pipeline": "pipeline schedules: show, verify, simulate, bubble, run",
    "sync": "workers and parameter servers: staleness and waiting, of a run or simulated",
    "lab": "a command's ranks on several hosts made on this machine, with links as slow as you want",
    "calibrate": "a cluster file for predictions: this host measured, or nvidia-smi's table read",
    "validate": "predicted against published measurements, source by source",
    "explain": "what a configuration of vLLM, DeepSpeed, Megatron-LM, torchtitan and others is and does",
    "launch": "a training as a job of SLURM, Kubernetes, or of hosts over ssh",
    "emit": "a layout as the configuration of another engine: a file or a command",
    "list": "models, devices, engines, schedules, algorithms and layout keys",
    "studio": "the page: watch what happens inside the devices, in a browser, offline",
    "demo": "the tour: predict, train on four processes, compare, one page",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    """Run one command line. Returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
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
        return _fail(str(error), 2)
    except KeyboardInterrupt as error:
        # The user's own interrupt: no error.
        return _end(str(error) or "interrupted", getattr(error, "exit_code", 130))
    except BrokenPipeError:
        # Whoever read us has left; the interpreter must not complain about it either when it flushes.
        _drop_output()
        return 141
    except OSError as error:
        if not (_output_refused() or error.errno in _NO_ROOM):
            return _unexpected(error, "--traceback" in argv)
        return _fail(f"cannot write{f' to {error.filename}' if error.filename else ''}: {error.strerror}", 2)
    except Exception as error:
        return _unexpected(error, "--traceback" in argv)


def _fail(line: str, code: int) -> int:
    return _end(f"error: {line}", code)


def _end(line: str, code: int) -> int:
    print(f"shardwise: {' '.join(line.split())}", file=sys.stderr)
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


def _unexpected(error: Exception, show: bool) -> int:
    from shardwise.runtime.job.launch import RunFailed

    if isinstance(error, RunFailed):
        return _fail(str(error), 1)
    if show:
        traceback.print_exc()
    return _fail(f"{type(error).__name__}: {error}; this is a bug in shardwise, --traceback shows where", 1)


def _dispatch(argv: list[str]) -> int:
    if sys.stdout is None:
        # Closed: the next file that is opened would get its number, and what ranks write there.
        raise UserError("standard output is closed: send it to /dev/null if it is not needed")
    while argv and argv[0] == "--traceback":
        argv = argv[1:]
    if not argv or argv[0] in ("-h", "--help", "help"):
        _help()
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        from shardwise import __version__

        print(f"shardwise {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise UserError(f"unknown {kind} {name!r}; {did_you_mean(name, COMMANDS, 'commands:')}")
    args = parser_of(name).parse_args(rest)
    run: Run = args.run if "run" in args else import_module(f"shardwise.cli.{name}").run
    return run(args)


def parser_of(name: str) -> Parser:
    """The parser of one of `COMMANDS`."""
    command = import_module(f"shardwise.cli.{name}")
    parser = Parser(prog=f"shardwise {name}", description=command.__doc__, allow_abbrev=False)
    command.add_arguments(parser)
    for flag, text in FLAGS.items():
        parser.add_argument(flag, action="store_true", help=text)
    return parser


def _help() -> None:
    print("usage: shardwise [-V | --version] [--traceback] COMMAND ...\n")
    print("Split large language models across devices: plan the split, run it, hold the two against each other.\n")
    for name, summary in COMMANDS.items():
        print(f"  {name:<10} {summary}")
    print("\nshardwise COMMAND --help tells more. Every command takes --json.")
