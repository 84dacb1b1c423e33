"""`FittedTable`: columns with units and ranks, for a terminal, a notebook and pandas.

Numbers are kept as they are. A table that is too wide for a terminal breaks its headings between words, then leaves out
whole columns and says which; no cell is ever cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from shardwise.records import dataclass
from shardwise.report.terminal import BREAKS, wrap
from shardwise.report.units import format_bytes, format_count, format_share, format_time

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text

Cell: TypeAlias = "str | Text | float | None"
"""A text, or a number in the unit of its column; None is empty."""

UNITS: Mapping[str, Callable[[Any], str]] = {
    "bytes": format_bytes,
    "seconds": format_time,
    "share": format_share,
    "change": partial(format_share, signed=True),
    "count": format_count,
    "": "{:,}".format,
}
"""Unit of a column -> how its numbers are printed; change: a share with its sign, count: three digits."""

_GAP = 2
"""Spaces between two columns."""
_LAYOUT = 26
"""Characters that a column of layouts keeps before another column is left out."""


@dataclass(frozen=True)
class Column:
    """One column of a `FittedTable`."""

    name: str
    unit: str = ""
    """One of `UNITS`."""
    left: bool = False
    """Aligned to the left."""
    drop: int = 0
    """Order in which columns are left out: the highest number first; those with 0 last, from the right."""
    wraps: bool = False
    """Cells may take several lines: texts, and layouts between their keys."""
    least: int = _LAYOUT
    """Characters that such a column keeps before another one is left out."""

    def text(self, cell: Cell) -> str | Text:
        if isinstance(cell, (int, float)):
            return UNITS[self.unit](cell)
        return "" if cell is None else cell


@dataclass
class FittedTable:
    """A table that shows as many of its columns as fit the width that it is printed at."""

    columns: Sequence[Column]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    title: str = ""
    ends: set[int] = field(default_factory=set)
    """Rows that are followed by an empty line."""
    plain: bool = False
    """Without a line below the headings."""

    def add_row(self, *cells: Cell, end_section: bool = False) -> None:
        """Add one cell for each column, or for the first ones; end_section: and an empty line."""
        self.rows.append((*cells, *[""] * (len(self.columns) - len(cells))))
        if end_section:
            self.ends.add(len(self.rows) - 1)

    def to_dataframe(self) -> Any:
        """A `pandas.DataFrame` of the columns, numbers in bytes, seconds and shares. Raises `ImportError` without
        pandas."""
        return import_module("pandas").DataFrame(self.records())

    def records(self) -> list[dict[str, Any]]:
        """Rows as column -> number or text."""
        names = [column.name for column in self.columns]
        plain = ([cell if isinstance(cell, (int, float)) else str(cell or "") for cell in row] for row in self.rows)
        return [dict(zip(names, row, strict=True)) for row in plain]

    def _repr_html_(self) -> str:
        from shardwise.report.printing import as_html

        return as_html([self])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        cells = [[column.text(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows]
        # A text longer than `_LAYOUT` takes several lines in any column, before it costs a number its place.
        longest = [max((_length(row[i]) for row in cells), default=0) for i in range(len(self.columns))]
        wraps = [column.wraps or (column.left and longest[i] > _LAYOUT) for i, column in enumerate(self.columns)]
        shown, widths = self._fit(cells, wraps, options.max_width)
        table = self._empty()
        for i in shown:
            column = self.columns[i]
            table.add_column(
                wrap(column.name, widths[i]),
                justify="left" if column.left else "right",
                no_wrap=not wraps[i],
                overflow="fold",
            )
        for number, row in enumerate(cells):
            shape = [(row[i], widths[i] if wraps[i] else 0) for i in shown]
            broken = (wrap(cell, width) if width and isinstance(cell, str) else cell for cell, width in shape)
            table.add_row(*broken, end_section=number in self.ends)
        if self.title:
            yield Text(wrap(self.title, options.max_width), "bold")
        yield table
        dropped = [column.name for i, column in enumerate(self.columns) if i not in shown and column.name]
        if dropped:
            yield wrap(f"not shown at this width: {', '.join(dropped)} (--json has all)", options.max_width)

    def _empty(self) -> Table:
        from rich import box
        from rich.table import Table

        frame = None if self.plain else box.SIMPLE_HEAD
        return Table(box=frame, padding=(0, _GAP - 1 + self.plain, 0, 0), pad_edge=False, show_edge=False)

    def _fit(
        self, cells: Sequence[Sequence[str | Text]], wraps: Sequence[bool], width: int
    ) -> tuple[list[int], dict[int, int]]:
        natural, least = {}, {}
        for i, column in enumerate(self.columns):
            lines = [column.name, *(row[i] for row in cells)]
            natural[i] = max(map(_length, lines))
            broken = lines if wraps[i] else lines[:1]
            words = max(len(piece) for line in broken for piece in BREAKS.split(str(line)))
            whole = max(map(_length, lines[1:]), default=0)
            least[i] = min(natural[i], max(column.least, words)) if wraps[i] else max(words, whole)
        shown = list(natural)
        while len(shown) > 1 and sum(least[i] + _GAP for i in shown) - _GAP > width:
            shown.remove(max(shown[1:], key=lambda i: (self.columns[i].drop, i)))
        spare = width - (sum(least[i] + _GAP for i in shown) - _GAP)
        widths = {}
        for i in shown:
            more = max(0, min(spare, natural[i] - least[i]))
            widths[i], spare = max(1, least[i] + more), spare - more
        return shown, widths


def _length(cell: str | Text) -> int:
    from rich.cells import cell_len

    return cell_len(str(cell))


def headed(
    left: Iterable[str], right: Iterable[str] = (), title: str = "", plain: bool = False,
    drop: Sequence[str] = (), unit: str = "",
) -> FittedTable:  # fmt: skip
    """An empty table: columns aligned to the left by their headings, then those to the right, whose numbers are in
    `unit`. drop: headings of columns that are left out first, in order."""
    ranks = {name: len(drop) - place for place, name in enumerate(drop)}
    texts = [Column(name, left=True, wraps=True, least=0) for name in left]
    return FittedTable(
        [*texts, *(Column(name, unit, drop=ranks.get(name, 0)) for name in right)], title=title, plain=plain
    )


def plain_table(left: Iterable[str], right: Iterable[str] = (), title: str = "", **more: Any) -> FittedTable:
    """`headed`, without a line below the headings."""
    return headed(left, right, title, plain=True, **more)


def rows_by_name(names: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> FittedTable:
    """A column for each of `names`; each row is a text and its cells."""
    columns = (Column("", left=True, wraps=True), *(Column(name, wraps=True) for name in names))
    return FittedTable(columns, [(words, *cells) for words, cells in rows])
