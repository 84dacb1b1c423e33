"""Sections about memory: what ranks hold, predicted and observed, and a model under the stages of ZeRO."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.report.compare import ReportComparison
from shardwise.report.figures import (
    memory_bar,
)
from shardwise.report.page.bar_figure import byte_figure
from shardwise.report.page.document import Section, TableCell, check, table
from shardwise.report.page.markup import Markup, element, join
from shardwise.report.page.palette import KINDS
from shardwise.report.step_report import Bytes
from shardwise.report.tables import difference, gpu_counts
from shardwise.report.units import (
    byte_note,
    format_bytes,
    format_role,
)

MOST_BARS = 16
"""Roles drawn in a memory chart; the table has all of them."""


def memory_section(comparison: ReportComparison, binary: bool = False) -> Section:
    """Memory by class of every role, both reports' bars one below the other, and the table of differences."""
    names = comparison.labels
    pairs = comparison.pairs[:MOST_BARS]
    groups = [
        [
            memory_bar(format_role(pair.role, pair.ranks), names[0], pair.a.bytes),
            memory_bar(format_role(pair.role, pair.ranks), names[1], pair.b.bytes),
        ]
        for pair in pairs
    ]
    rest = len(comparison.pairs) - len(pairs)
    note = element("p", f"{rest} more roles are in the table.", class_="note") if rest else None
    lead = f"Bytes that one rank holds at its peak, {names[0]} above {names[1]}. {byte_note(binary)}."
    return Section("Memory", join([byte_figure(groups, binary), note, _memory_table(comparison, binary)]), lead)


def _memory_table(comparison: ReportComparison, binary: bool) -> Markup:
    ranks = {pair.role: pair.ranks for pair in comparison.pairs}
    rows = []
    for row in comparison.bytes:
        label = KINDS[row.byte_class].label if row.byte_class in KINDS else row.byte_class
        good = row.accepted
        text = difference(row, binary)
        verdict = TableCell(text) if good is None else check(good, text)
        sides = [f"{format_bytes(n, binary)}" for n in (row.a, row.b)]
        rows.append((format_role(row.role, ranks[row.role]), label, *sides, f"{row.a:,}", f"{row.b:,}", verdict))
    a, b = comparison.labels
    heads = ("role", "class", a, b, f"{a}, bytes", f"{b}, bytes", "difference")
    return table("Memory by role and class", heads, rows, (2, 3, 4, 5))


def zero_section(
    model: str, cells: Mapping[int, Mapping[int, Bytes]], capacity: int | None = None, binary: bool = False
) -> Section:
    """Memory of a model under ZeRO stages and numbers of GPUs (stage -> GPUs -> `Bytes` of each GPU)."""
    gpus = gpu_counts(cells)
    groups = [
        [memory_bar(f"ZeRO-{stage}", f"{count} GPUs", row[count]) for stage, row in cells.items() if count in row]
        for count in gpus
    ]
    chart = byte_figure(groups, binary, capacity)
    heads = ("ZeRO stage", *(f"{count} GPUs" for count in gpus))
    rows = [(str(stage), *(_zero_cell(row, count, capacity, binary) for count in gpus)) for stage, row in cells.items()]
    lead = f"Bytes on each GPU. {byte_note(binary)}."
    if capacity is not None:
        lead += f" The dashed line is a GPU's memory, {format_bytes(capacity, binary)}; ✓ fits, ✗ does not."
    body = join([chart, table(f"{model} under ZeRO", heads, rows, range(1, len(heads)))])
    return Section(f"{model} under ZeRO", body, lead)


def _zero_cell(row: Mapping[int, Bytes], count: int, capacity: int | None, binary: bool) -> object:
    if count not in row:
        return ""
    total = row[count].total
    text = format_bytes(total, binary)
    return text if capacity is None else check(total <= capacity, text)
