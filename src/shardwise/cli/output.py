"""Printing: JSON without rich, tables with it."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from shardwise.codec import plain
from shardwise.report.strict_json import strict
from shardwise.report.terminal import Renderable, Verbatim, wrap

if TYPE_CHECKING:
    from shardwise.cli.declare import CommandOptions

PATIENCE = 1.0
"""Seconds before a command says that it is working."""


_results: ContextVar[list[tuple[Any, tuple[Renderable, ...]]] | None] = ContextVar("results", default=None)


@contextmanager
def collected() -> Iterator[list[tuple[Any, tuple[Renderable, ...]]]]:
    """The results that commands print meanwhile, in place of printing them: data, and texts and tables."""
    results: list[tuple[Any, tuple[Renderable, ...]]] = []
    token = _results.set(results)
    try:
        yield results
    finally:
        _results.reset(token)


def print_json(data: Any) -> None:
    """One JSON document on standard output (`codec.plain`), with NaN and infinities as texts."""
    if (results := _results.get()) is not None:
        results.append((plain(data), ()))
        return
    print(json.dumps(strict(plain(data)), indent=1, allow_nan=False))


def print_result(args: CommandOptions, data: Any, lines: Iterable[Renderable]) -> int:
    """Print `data`, or what it returns, with --json, else the texts and tables of `lines`. Returns the exit code 0."""
    if (results := _results.get()) is not None:
        results.append((plain(data() if callable(data) else data), tuple(lines)))
    elif args.json:
        print_json(data() if callable(data) else data)
    else:
        show(*lines)
    return 0


def progress(line: str = "") -> None:
    """On a terminal, put a line where the last one stood; none at the end, so that nothing of it stays."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


@contextmanager
def working(doing: str) -> Iterator[Callable[[str], None]]:
    """On a terminal, say what is being done and for how long, from `PATIENCE` seconds on; nothing of it stays. Gives a
    function that says how far it is; elsewhere that prints a line on standard error."""
    if not sys.stderr.isatty():
        yield lambda line: print(f"{doing}: {line}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    display = Progress(*columns, console=Console(stderr=True), transient=True)
    task = display.add_task(doing, total=None)
    timer = threading.Timer(PATIENCE, display.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda line: display.update(task, description=f"{doing}: {line}")
    finally:
        timer.cancel()
        timer.join()
        display.stop()


def show(*things: Renderable) -> None:
    """Print texts and tables on standard output, as wide as the terminal, as `COLUMNS` says, or 160 columns."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # A pipe has no width, and a table cut to 80 columns would lose what it shows.
        console.width = 160
    for thing in things:
        if isinstance(thing, Verbatim):
            console.print(thing, soft_wrap=True)
        else:
            console.print(wrap(thing, console.width) if isinstance(thing, str) else thing)
