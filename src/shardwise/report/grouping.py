"""Eighty identical blocks as one line: rows that differ only in the block they serve, joined."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from shardwise.records import dataclass
from shardwise.report.step_report import LedgerRow, StepReport
from shardwise.report.units import format_spans

if TYPE_CHECKING:
    from shardwise.report.compare import ComparedRow, ReportComparison

Row = TypeVar("Row")

_INDEX = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)", re.ASCII)


@dataclass(frozen=True)
class RowGroup(Generic[Row]):
    """Rows that are identical except for their unit. label: the units, "blocks.0-79 ×80". units: how many there are."""

    label: str
    units: int
    rows: tuple[Row, ...]


def group_units(
    rows: Iterable[Row], unit: Callable[[Row], str], alike: Callable[[Row], Hashable]
) -> tuple[RowGroup[Row], ...]:
    """Join rows with an equal `alike` whose units differ only in their first number, in order of first appearance."""
    members: dict[Hashable, list[Row]] = {}
    for row in rows:
        members.setdefault((alike(row), _INDEX.sub("\0", unit(row), count=1)), []).append(row)
    return tuple(_group(joined, [unit(row) for row in joined]) for joined in members.values())


def _group(rows: list[Row], units: list[str]) -> RowGroup[Row]:
    results = [_INDEX.search(unit) for unit in units]
    numbers = tuple(sorted({int(match[0]) for match in results if match}))
    if not all(results) or len(numbers) == 1:
        return RowGroup(units[0], 1, tuple(rows))
    label = _INDEX.sub(format_spans(numbers), units[0], count=1)
    return RowGroup(f"{label} \N{MULTIPLICATION SIGN}{len(numbers)}", len(numbers), tuple(rows))


def group_ledger(rows: Iterable[LedgerRow]) -> tuple[RowGroup[LedgerRow], ...]:
    return group_units(
        rows, lambda row: row.unit, lambda row: (row.phase, row.op, row.axes, row.dtype, row.elements, row.count)
    )


def group_compared(rows: Iterable[ComparedRow]) -> tuple[RowGroup[ComparedRow], ...]:
    """Compared rows of one role with identical blocks joined; blocks whose counts differ stay apart."""
    return group_units(
        rows, lambda row: row.key.unit, lambda row: (row.key._replace(unit=""), row.count_a, row.count_b)
    )


def ledgers(report: StepReport) -> Iterator[tuple[tuple[int, ...], tuple[LedgerRow, ...]]]:
    """(ranks, ledger) of each distinct ledger: roles that differ only in their bytes are one here."""
    ranks: dict[tuple[LedgerRow, ...], list[int]] = {}
    for role in report.roles:
        ranks.setdefault(role.ledger, []).extend(role.ranks)
    for ledger, members in ranks.items():
        yield tuple(sorted(members)), ledger


def compared_ledgers(comparison: ReportComparison) -> Iterator[tuple[tuple[int, ...], tuple[ComparedRow, ...]]]:
    """(ranks, rows) of each distinct compared ledger: role pairs that differ only in their bytes are one here."""
    rows_of: dict[str, list[ComparedRow]] = {pair.role: [] for pair in comparison.pairs}
    for row in comparison.rows:
        rows_of[row.role].append(row)
    joined: dict[Hashable, tuple[list[int], tuple[ComparedRow, ...]]] = {}
    for pair in comparison.pairs:
        rows = tuple(rows_of[pair.role])
        contents = tuple((row.key, row.count_a, row.count_b) for row in rows)
        joined.setdefault(contents, ([], rows))[0].extend(pair.ranks)
    for ranks, rows in joined.values():
        yield tuple(sorted(ranks)), rows
