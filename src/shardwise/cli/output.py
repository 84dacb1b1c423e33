"""Printing: JSON without rich, tables with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_json(data: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(data, indent=1, allow_nan=False))


def show(*things: RenderableType) -> None:
    """Texts and tables on standard output, as wide as a terminal, or as needed where there is none."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # A pipe has no width, and a table cut to 80 columns would lose what it shows.
        console.width = 160
    for thing in things:
        console.print(thing)
