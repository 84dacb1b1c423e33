"""Results that print as the tables of the command line, in a terminal and in a notebook."""

import io
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from html import escape
from importlib import import_module
from itertools import cycle
from typing import Any, TypeAlias

from shardwise.report.terminal import Renderable, wrap

_WIDTH = 100
"""Characters of a line where there is no terminal."""
_HTML = (
    '<pre style="font-family: Menlo, DejaVu Sans Mono, Consolas, monospace; line-height: 1.2; white-space: pre; '
    'overflow-x: auto">{code}</pre>'
)
Bar: TypeAlias = tuple[str, Mapping[str, float], Callable[[float], str]]
"""A sum: its title, part -> value, and a value in words."""


class Printable:
    """Base of such results."""

    __slots__ = ()

    @abstractmethod
    def tables(self) -> Iterable[Renderable]:
        """Texts and tables, the conclusion first."""

    @abstractmethod
    def conclusion(self) -> str:
        """The result in one sentence."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.conclusion()}>"

    def __str__(self) -> str:
        import shutil

        return as_text(self.tables(), shutil.get_terminal_size((_WIDTH, 1)).columns)

    def _repr_html_(self) -> str:
        return as_html(self.tables()) + bars_svg(self.bars())

    def bars(self) -> Iterable[Bar]:
        """Sums that a notebook draws."""
        return ()

    def records(self) -> list[dict[str, Any]]:
        """The result's first table, or the rows of --json."""
        from shardwise.report.table import FittedTable

        table = next((one for one in self.tables() if isinstance(one, FittedTable)), None)
        return table.records() if table else []

    def to_dataframe(self) -> Any:
        """A `pandas.DataFrame` of `records`, numbers in bytes and seconds. Raises `ImportError` without pandas."""
        return import_module("pandas").DataFrame(self.records())


_WIDE, _HIGH = 640, 18
"""Pixels of a bar, and of a line."""


def bars_svg(bars: Iterable[Bar]) -> str:
    """Stacked bars with their legends, as SVG; empty without any."""
    from shardwise.report.palette import BYTE_CLASSES

    colors = [kind.light for kind in BYTE_CLASSES.values()]
    shapes: list[str] = []
    y = 0
    for title, parts, words in bars:
        total, x, y = sum(parts.values()), 0.0, y + _HIGH
        shapes.append(f'<text x="0" y="{y}" font-weight="bold">{escape(title)}: {words(total)}</text>')
        legend: list[str] = []
        for color, (name, value) in zip(cycle(colors), parts.items(), strict=False):
            wide = _WIDE * value / total if total else 0.0
            shapes.append(f'<rect x="{x:.1f}" y="{y + 6}" width="{wide:.1f}" height="{_HIGH}" fill="{color}"/>')
            line = y + _HIGH * (len(legend) + 3)
            legend.append(f'<rect x="0" y="{line - 10}" width="10" height="10" fill="{color}"/>')
            legend[-1] += f'<text x="16" y="{line}">{escape(name)}: {words(value)}</text>'
            x += wide
        shapes += legend
        y += _HIGH * (len(legend) + 3)
    size = f'width="{_WIDE}" height="{y}" viewBox="0 0 {_WIDE} {y}"'
    style = 'style="font: 12px sans-serif; background: white"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(shapes)}</svg>' if shapes else ""


def as_text(things: Iterable[Renderable], width: int) -> str:
    """Texts and tables in lines of at most `width` characters, without colors."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, markup=False, color_system=None)
    for thing in things:
        console.print(wrap(thing, width) if isinstance(thing, str) else thing)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def as_html(things: Iterable[Renderable]) -> str:
    """The same as HTML, with colors."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_WIDTH, highlight=False, markup=False, record=True)
    for thing in things:
        console.print(wrap(thing, _WIDTH) if isinstance(thing, str) else thing)
    return console.export_html(code_format=_HTML, inline_styles=True)
