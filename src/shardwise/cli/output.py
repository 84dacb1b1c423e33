"""Printing: JSON without rich, tables with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.report.strict_json import strict

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def print_json(data: Any) -> None:
    """One JSON document on standard output, with NaN and infinities as texts."""
    print(json.dumps(strict(data), indent=1, allow_nan=False))


def progress(line: str = "") -> None:
    """On a terminal, put a line where the last one stood; none at the end, so that nothing of it stays."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def show(*things: RenderableType) -> None:
    """Texts and tables on standard output, as wide as a terminal, or as needed where there is none."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # A pipe has no width, and a table cut to 80 columns would lose what it shows.
        console.width = 160
    for thing in things:
        console.print(thing)


def side_by_side(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> Table:
    """A column for each name."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for words, cells in rows:
        table.add_row(words, *cells)
    return table
