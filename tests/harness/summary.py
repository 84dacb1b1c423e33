"""Measurements that tests hand over to be printed at the end of the run."""

from __future__ import annotations

from collections.abc import Iterator

_tables: dict[str, list[tuple[str, ...]]] = {}


def add(title: str, header: tuple[str, ...], row: tuple[str, ...]) -> None:
    """Add a row to the table `title`; the first call's header stands above it."""
    _tables.setdefault(title, [header]).append(row)


def sections() -> Iterator[tuple[str, list[str]]]:
    """(title, aligned lines) of every table."""
    for title, rows in _tables.items():
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        yield title, ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
