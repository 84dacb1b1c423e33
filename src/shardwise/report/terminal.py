"""Text and tables that fit a terminal.

Text wraps between words and between the keys of a layout. A table that is too wide leaves out its least important
columns, and says which.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, TypeAlias

from shardwise.records import dataclass

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

Renderable: TypeAlias = "RenderableType"
"""A text or a table, where rich is not loaded."""

_GAP = 2
"""Spaces between two columns."""

_LAYOUT = 26
"""Characters that a column of layouts keeps before another column is left out."""

_BREAKS = re.compile(r"(\s+|(?<=,)(?=[a-z]))")
"""Places where a line may end: white space, and between two keys of a layout."""


class _Wrapper(textwrap.TextWrapper):
    def _split(self, text: str) -> list[str]:
        return [chunk for chunk in _BREAKS.split(text) if chunk]


def wrap(text: str, width: int) -> str:
    """`text` in lines of at most `width` characters. An indented line continues two characters further in."""
    lines: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        wrapper = _Wrapper(width, initial_indent=indent, subsequent_indent=indent + "  " if indent else "")
        lines += wrapper.wrap(line.lstrip()) or [""]
    return "\n".join(lines)


def new_table(title: str = "", gap: int = _GAP) -> Table:
    """An empty table in the style of every command, with `gap` spaces between columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
    table.title, table.title_justify, table.title_style = title or None, "left", "bold"
    return table


def plain_table(left: Iterable[str], right: Iterable[str] = (), title: str | None = None) -> Table:
    """An empty table without lines: columns aligned to the left by their headings, then those to the right."""
    from rich import table

    columns = [table.Column(heading, justify="right") for heading in right]
    return table.Table(*left, *columns, title=title, title_justify="left", box=None, pad_edge=False)


@dataclass(frozen=True)
class Column:
    """One column of a `FittedTable`."""

    name: str
    left: bool = False
    """Aligned to the left."""
    drop: int = 0
    """Order in which columns are left out: the highest number first, 0 never."""
    wraps: bool = False
    """Cells may take several lines: texts, and layouts between their keys."""


@dataclass
class FittedTable:
    """A table that shows as many of its columns as fit the width that it is printed at."""

    columns: Sequence[Column]
    rows: list[Sequence[str | Text]] = field(default_factory=list)
    title: str = ""
    ends: set[int] = field(default_factory=set)
    """Rows that are followed by an empty line."""

    def add_row(self, *cells: str | Text, end_section: bool = False) -> None:
        """Add one cell for each column; end_section: and an empty line."""
        self.rows.append(cells)
        if end_section:
            self.ends.add(len(self.rows) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, widths = self._fit(options.max_width)
        table = new_table(self.title)
        for i in shown:
            column = self.columns[i]
            name = wrap(column.name, widths[i]) if column.wraps else column.name
            table.add_column(name, justify="left" if column.left else "right", no_wrap=not column.wraps)
        for number, row in enumerate(self.rows):
            table.add_row(*(self._cell(row[i], i, widths[i]) for i in shown), end_section=number in self.ends)
        yield table
        dropped = [column.name for i, column in enumerate(self.columns) if i not in shown]
        if dropped:
            yield wrap(f"not shown at this width: {', '.join(dropped)} (--json has all)", options.max_width)

    def _cell(self, cell: str | Text, i: int, width: int) -> str | Text:
        return wrap(cell, width) if self.columns[i].wraps and isinstance(cell, str) else cell

    def _fit(self, width: int) -> tuple[list[int], dict[int, int]]:
        """Indices of the columns that fit, and the width of each."""
        natural = {i: max(_length(line) for line in self._lines(i)) for i in range(len(self.columns))}
        least = {i: self._least(i, natural[i]) if column.wraps else natural[i] for i, column in enumerate(self.columns)}
        shown = list(natural)
        while sum(least[i] + _GAP for i in shown) - _GAP > width:
            droppable = [i for i in shown if self.columns[i].drop]
            if not droppable:
                break
            shown.remove(max(droppable, key=lambda i: self.columns[i].drop))
        spare = width - (sum(least[i] + _GAP for i in shown) - _GAP)
        widths = {}
        for i in shown:
            more = max(0, min(spare, natural[i] - least[i]))
            widths[i], spare = least[i] + more, spare - more
        return shown, widths

    def _lines(self, i: int) -> Iterator[str | Text]:
        yield self.columns[i].name
        yield from (row[i] for row in self.rows)

    def _least(self, i: int, natural: int) -> int:
        pieces = (piece for line in self._lines(i) for piece in _BREAKS.split(str(line)))
        return min(natural, max(_LAYOUT, *map(len, pieces)))


def _length(cell: str | Text) -> int:
    from rich.cells import cell_len

    return cell_len(str(cell))


def rows_by_name(names: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> FittedTable:
    """A column for each of `names`; each row is a text and its cells."""
    columns = (Column("", left=True, wraps=True), *(Column(name, wraps=True) for name in names))
    return FittedTable(columns, [(words, *cells) for words, cells in rows])
