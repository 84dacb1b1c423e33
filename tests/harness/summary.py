"""Measurements that tests hand over to be printed at the end of the run.

They travel as properties of a test's report: that is what a process that runs tests sends to the one that prints.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

PROPERTY = "measured"


def add(record_property: Callable[[str, Any], None], title: str, header: Iterable[str], row: Iterable[str]) -> None:
    """Add a row to the table `title`; the first one's header stands above it. record_property: pytest's fixture."""
    record_property(PROPERTY, [title, list(header), list(row)])


def sections(reports: Iterable[Any]) -> Iterator[tuple[str, list[str]]]:
    """(title, aligned lines) of every table in the reports of tests."""
    tables: dict[str, list[list[str]]] = {}
    for report in reports:
        for name, value in report.user_properties:
            if name == PROPERTY:
                title, header, row = value
                tables.setdefault(title, [header]).append(row)
    for title, rows in tables.items():
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        yield title, ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
