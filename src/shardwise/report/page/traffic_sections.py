"""Sections about communication: the ledger, predicted and observed, and the time that a transport took for it."""

from __future__ import annotations

import math

from shardwise.report.compare import ComparedRow, ReportComparison
from shardwise.report.figures import (
    Bar,
    BarSegment,
    scale,
    ticks,
)
from shardwise.report.grouping import RowGroup, compared_ledgers, group_compared
from shardwise.report.page.bar_figure import bar_figure
from shardwise.report.page.document import Section, TableCell, check, details, table
from shardwise.report.page.markup import Markup, element, join
from shardwise.report.step_report import Role, StepReport
from shardwise.report.transport import TransportLine, transport_lines
from shardwise.report.units import (
    byte_note,
    format_bytes,
    format_ranks,
    format_time,
)


def ledger_section(comparison: ReportComparison, binary: bool = False) -> Section:
    """Every collective of one step, both counts, identical blocks joined; payload is the full tensor's bytes."""
    parts: list[Markup] = []
    for ranks, rows in compared_ledgers(comparison):
        equal = sum(row.equal for row in rows)
        title = f"{format_ranks(ranks)}: {equal} of {len(rows)} rows equal"
        parts += [element("h3", title[0].upper() + title[1:]), _ledger_table(comparison, title, rows, binary)]
    for ranks, report in ((comparison.ranks_only_a, comparison.b), (comparison.ranks_only_b, comparison.a)):
        if ranks:
            parts.append(element("p", f"The {report.source} report lacks {format_ranks(ranks)}.", class_="bad"))
    lead = (
        "The collectives of one steady step, by the phase that uses their result. Payload is the full tensor, "
        f"not what crosses a wire. {byte_note(binary)}."
    )
    return Section("Ledger", join(parts), lead)


def _ledger_table(comparison: ReportComparison, caption: str, rows: tuple[ComparedRow, ...], binary: bool) -> Markup:
    lines = [_ledger_line(group, binary) for group in group_compared(rows)]
    total_a, total_b = (sum(getattr(row, side) for row in rows) for side in ("count_a", "count_b"))
    payload = sum(row.key.payload_bytes * row.count_b for row in rows)
    equal = check(all(row.equal for row in rows))
    totals = (f"{total_a:,}", f"{total_b:,}", format_bytes(payload, binary), equal)
    lines.append((TableCell("all", "strong"), *[""] * 5, *totals))
    a, b = comparison.labels
    names = ("phase", "operation", "axes", "unit", "type", "elements")
    heads = (*names, f"{a} calls", f"{b} calls", f"{b} payload", "equal")
    return table(f"Ledger, {caption}", heads, lines, (5, 6, 7, 8))


def _ledger_line(group: RowGroup[ComparedRow], binary: bool) -> tuple[object, ...]:
    row = group.rows[0]
    key = row.key
    calls = [f"{sum(getattr(r, side) for r in group.rows):,}" for side in ("count_a", "count_b")]
    payload = sum(r.key.payload_bytes * r.count_b for r in group.rows)
    names = (key.phase, element("code", key.op), key.axes, group.label, key.dtype, f"{key.elements:,}")
    return (*names, *calls, format_bytes(payload, binary), check(row.equal))


def transport_section(report: StepReport, binary: bool = False) -> Section:
    """Time and waiting of each kind of collective, for the lowest rank of each role."""
    told = [role for role in report.roles if role.transport]
    lead = (
        "Time from issue to completion in one step, waiting for slower ranks included; "
        "what was hidden behind computation cost the step nothing."
    )
    if not told:
        return Section("Communication time", element("p", "No transport was recorded.", class_="empty"), lead)
    parts = [_transport(role, binary) for role in told]
    others = [details(f"rank {min(role.ranks)}", part) for role, part in zip(told[1:], parts[1:], strict=True)]
    head = element("h3", f"Rank {min(told[0].ranks)}")
    return Section("Communication time", join([head, parts[0], *others]), lead)


def _transport(role: Role, binary: bool) -> Markup:
    lines = transport_lines(role)
    sums: dict[tuple[str, str, str], tuple[float, float]] = {}
    for line in lines:
        if line.wait_s is not None and line.hidden_s is not None:
            waited, hidden = sums.get((line.phase, line.op, line.axes), (0.0, 0.0))
            sums[line.phase, line.op, line.axes] = (waited + line.wait_s, hidden + line.hidden_s)
    bars = [
        Bar(op, f"{phase}, {axes}", (BarSegment("waited", waited), BarSegment("hidden", hidden)))
        for (phase, op, axes), (waited, hidden) in sums.items()
    ]
    limit = scale(bars, None)
    unit = 10.0 ** math.floor(math.log10(limit))
    chart = bar_figure([bars], limit, format_time, ticks(limit, unit)) if bars else None
    heads = (
        "phase",
        "operation",
        "axes",
        "unit",
        "algorithm",
        "calls",
        "payload",
        "sent",
        "steps",
        "time",
        "stood still",
    )
    rows = [_transport_row(line, binary) for line in lines]
    return join([chart, table(f"Communication of {role.role}", heads, rows, range(5, 11))])


def _transport_row(line: TransportLine, binary: bool) -> tuple[object, ...]:
    sent = "" if line.bytes_sent is None else format_bytes(line.bytes_sent, binary)
    steps = "" if line.steps is None else f"{line.steps:,}"
    times = ["" if s is None else format_time(s) for s in (line.time_s, line.wait_s)]
    names = (line.phase, element("code", line.op), line.axes, line.label, line.algorithm)
    return (*names, f"{line.calls:,}", format_bytes(line.payload_bytes, binary), sent, steps, *times)
