"""A step report on a terminal: `rich` renderables, built on request.

Ledgers join identical blocks into one line. Bytes are in GB = 1e9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.report import time_parts
from shardwise.report.grouping import compared_ledgers, group_compared, group_ledger, ledgers
from shardwise.report.palette import KINDS, classes_of
from shardwise.report.printing import Bar
from shardwise.report.room import DeviceRoom
from shardwise.report.step_report import HOMES, Bytes, LedgerRow, Role, StepReport
from shardwise.report.table import Column, FittedTable, headed
from shardwise.report.timing_table import step_lines
from shardwise.report.units import format_bytes, format_ranks, format_role, format_share, format_things, format_time

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.text import Text

    from shardwise.report.compare import ComparedBytes, ComparedRow, ReportComparison
    from shardwise.report.exposure import Exposure

_BAR = 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def memory_table(report: StepReport, room: DeviceRoom | None = None) -> FittedTable:
    """Bytes by class of each role, with bars on one scale. room: of one device."""
    columns = (
        Column("role", left=True), Column("class", left=True), Column("bytes", "bytes"), Column("share", "share"),
        Column("", left=True),
    )  # fmt: skip
    table = FittedTable(columns, title="memory per rank (GB = 1e9 bytes)")
    longest = max((role.peak_bytes for role in report.roles), default=0)
    for role in report.roles:
        _add_role_memory(table, role, longest, room)
    return table


def memory_bar(held: Bytes) -> Bar:
    """Bytes of a rank by class, for a notebook."""
    parts = {kind.label: getattr(held, field) for field, kind in classes_of([held]).items()}
    return "memory per device", {label: nbytes for label, nbytes in parts.items() if nbytes}, format_bytes


def time_bar(parts: Mapping[str, float]) -> Bar:
    """Seconds of a step by part, for a notebook."""
    return "time of one step", time_parts.in_words(parts, time_parts.STEP), format_time


def _add_role_memory(table: FittedTable, role: Role, longest: int, room: DeviceRoom | None) -> None:
    peak = role.peak_bytes
    # On two lines, next to the first two classes: at 80 columns there is no room for one.
    names = [role.role, f"({format_ranks(role.ranks)})"]
    for field, kind in classes_of([role.bytes]).items():
        held = getattr(role.bytes, field)
        share = held / peak if peak else 0.0
        table.add_row(names.pop(0) if names else "", kind.label, held, share, _bar(held, longest, kind.light))
    elsewhere = any(getattr(role, home) != Bytes() for home in HOMES)
    if room is None:
        table.add_row("", _text("peak", "bold"), _text(format_bytes(peak), "bold"), end_section=not elsewhere)
    else:
        sign, style = _ROOM[room.state(peak)]
        verdict = _text(f"{sign} {room.verdict(peak)}", style)
        cells = (_text(text, "bold") for text in ("peak", format_bytes(peak), format_share(peak / room.usable)))
        table.add_row("", *cells, verdict, end_section=not elsewhere)
    if elsewhere:
        _add_other_homes(table, role)


_ROOM = {"fits": ("✓", "green"), "at risk": ("!", "bold yellow"), "does not fit": ("✗", "bold red")}
"""State of a device's room -> its sign and style."""


def _add_other_homes(table: FittedTable, role: Role) -> None:
    """Bytes in the host's memory and on disk, by class."""
    for home in HOMES:
        held: Bytes = getattr(role, home)
        classes = {kind.label: getattr(held, field) for field, kind in classes_of([held]).items()}
        for label, nbytes in classes.items():
            if nbytes:
                table.add_row("", f"{home}: {label}", nbytes)
        if held.total:
            table.add_row("", _text(f"{home}", "bold"), _text(format_bytes(held.total), "bold"))
    table.ends.add(len(table.rows) - 1)


def report_conclusion(report: StepReport, room: DeviceRoom | None = None) -> str:
    """Memory and time of a step in one sentence. room: of one device."""
    peak = max((role.peak_bytes for role in report.roles), default=0)
    parts = [f"{format_bytes(peak)} per rank"]
    if room is not None:
        parts = [room.state(peak), f"{format_bytes(peak)} of {format_bytes(room.usable)} per device"]
    if report.time is not None:
        parts.append(f"{format_time(report.time)} per step")
    if report.timing is not None:
        parts.append(f"bound by {time_parts.longest(report.timing['parts'])}")
    return ", ".join(parts)


def report_tables(report: StepReport) -> Iterator[RenderableType]:
    """A step report: its conclusion, memory, communication, time by part and notes."""
    name, workload = report.model.get("name", "a model"), report.workload
    yield f"{name}, layout {report.layout} on {report.cluster} ({report.source}): {report_conclusion(report)}\n"
    yield memory_table(report)
    yield communication_table(report)
    yield ""
    yield from step_lines(report, workload.get("batch", 0) * workload.get("seq", 0))
    yield from report.notes


def communication_table(report: StepReport) -> FittedTable:
    """Calls and payload bytes per collective and axes, on the ranks that communicate most."""
    role = report.busiest
    columns = (Column("collective", left=True), Column("axes", left=True), Column("calls"), Column("payload", "bytes"))
    table = FittedTable(columns, title=f"communication of one step, {format_ranks(role.ranks)}")
    for (op, axes), payload in sorted(role.payloads.items(), key=lambda item: -item[1]):
        calls = sum(row.count for row in role.ledger if (row.op, row.axes) == (op, axes))
        table.add_row(op, axes, calls, payload)
    total = sum(role.payloads.values())
    table.add_row(_text("all", "bold"), "", sum(row.count for row in role.ledger), total)
    return table


def ledger_table(report: StepReport) -> Group:
    """The ledger of one step, one table for ranks that share it, identical blocks joined, with payload bytes."""
    from rich.console import Group

    return Group(*_apart([_ledger(ranks, rows) for ranks, rows in ledgers(report)]))


def _ledger(ranks: tuple[int, ...], rows: tuple[LedgerRow, ...]) -> FittedTable:
    table = headed(
        ("operation", "axes", "unit"), ("elements", "count", "payload"), f"ledger of one step, {format_ranks(ranks)}"
    )
    phase = ""
    for group in group_ledger(rows):
        row = group.rows[0]
        phase = _head_line(table, phase, row.phase)
        payload = sum(member.payload_bytes for member in group.rows)
        cells = (f" {row.op}", row.axes, group.label, _size(row.elements, row.dtype), str(row.count))
        table.add_row(*map(_text, cells), format_bytes(payload))
    calls, payload = sum(row.count for row in rows), sum(row.payload_bytes for row in rows)
    table.add_row(_text("all", "bold"), "", "", "", str(calls), format_bytes(payload))
    return table


def exposure_table(rows: Sequence[tuple[str, int, Exposure]]) -> FittedTable:
    """Time of a step by kind, a line for each (name of the report, rank, figures); shares are of the step."""
    title = "time of one step, from its timeline: step = computed + exposed + idle"
    shares = ("computed", "communicated", "hidden", "exposed", "idle")
    columns = [Column("report", left=True, wraps=True), Column("rank", left=True), Column("step", "seconds")]
    table = FittedTable([*columns, *(Column(name, "share") for name in shares)], title=title)
    for name, rank, figures in rows:
        parts = (figures.compute, figures.communication, figures.hidden, figures.exposed, figures.idle)
        table.add_row(name, str(rank), figures.step / 1e9, *map(figures.share, parts))
    return table


def comparison_tables(comparison: ReportComparison) -> Group:
    """Both reports side by side: what differs in their settings, bytes by class, ledgers, where the time of a step went
    if a timeline tells, and a closing verdict."""
    from rich.console import Group

    parts: list[RenderableType] = [_text(f"different {text}", "yellow") for text in comparison.differences]
    for ranks, report in ((comparison.ranks_only_a, comparison.b), (comparison.ranks_only_b, comparison.a)):
        if ranks:
            parts.append(_text(f"✗ the {report.source} report lacks {format_ranks(ranks)}", "bold red"))
    parts.append(_compared_memory(comparison))
    parts += [_compared_ledger(comparison, ranks, rows) for ranks, rows in compared_ledgers(comparison)]
    if result := comparison.exposures:
        names = dict(zip(("a", "b"), comparison.labels, strict=True))
        parts.append(exposure_table([(names[side], rank, figures) for side, rank, figures in result]))
    return Group(*_apart([*parts, verdict(comparison)]))


def _compared_memory(comparison: ReportComparison) -> FittedTable:
    table = headed(("role", "class"), (), "memory per rank (GB = 1e9 bytes)")
    sides = (Column(name, "bytes", drop=1) for name in comparison.labels)
    table.columns = (*table.columns, *sides, Column("difference"), Column(""))
    ranks_of = {pair.role: pair.ranks for pair in comparison.pairs}
    shown = ""
    for row in comparison.bytes:
        name = "" if row.role == shown else format_role(row.role, ranks_of[row.role])
        shown = row.role
        label = KINDS[row.byte_class].label if row.byte_class in KINDS else row.byte_class
        label = f"{row.home}: {label}" if row.home else label
        peak = row.byte_class == "peak"
        mark = _text("") if row.accepted is None else _mark(row.accepted)
        table.add_row(name, label, row.a, row.b, difference(row), mark, end_section=peak)
    return table


def difference(row: ComparedBytes) -> str:
    """ "equal", or by how much side a exceeds side b, in bytes and as a share of b."""
    if row.equal:
        return "equal"
    share = f" ({format_share(row.relative, signed=True)})" if math.isfinite(row.relative) else ""
    return f"{'+' if row.a > row.b else ''}{format_bytes(row.a - row.b)}{share}"


def _compared_ledger(
    comparison: ReportComparison, ranks: tuple[int, ...], rows: tuple[ComparedRow, ...]
) -> FittedTable:
    equal = sum(row.equal for row in rows)
    title = f"ledger of one step, {format_ranks(ranks)}: {equal} of {len(rows)} rows equal"
    table = headed(("operation", "axes", "unit"), ("elements", *comparison.labels, ""), title)
    phase = ""
    for group in group_compared(rows):
        row = group.rows[0]
        phase = _head_line(table, phase, row.key.phase)
        cells = (f" {row.key.op}", row.key.axes, group.label, _size(row.key.elements, row.key.dtype))
        style = "" if row.equal else "bold red"
        counts = (_text(str(row.count_a), style), _text(str(row.count_b), style))
        table.add_row(*map(_text, cells), *counts, _mark(row.equal))
    return table


def verdict(comparison: ReportComparison) -> Text:
    """One line: are all ledger rows equal, the exact classes equal, and how far apart the peaks."""
    from rich.text import Text

    from shardwise.report.compare import PEAK_TOLERANCE

    rows = f"ledger: {sum(row.equal for row in comparison.rows)} of {len(comparison.rows)} rows equal"
    error = comparison.peak_error
    apart = f"peak {format_share(error)} apart" if math.isfinite(error) else "no peak to compare"
    marks = (
        _mark(comparison.equal_ledger, rows, rows),
        _mark(comparison.exact_classes_equal, "bytes by class equal", "bytes by class differ"),
        _mark(error <= PEAK_TOLERANCE, f"peak within {format_share(error)}", apart),
    )
    return Text("   ").join(marks)


def zero_table(
    cells: Mapping[int, Mapping[int, float]],
    title: str,
    capacity: int | None = None,
    sent: Mapping[int, int] | None = None,
) -> FittedTable:
    """Bytes on each GPU: a row for each ZeRO stage, a column for each number of GPUs; ✓ where `capacity` suffices.

    cells: stage -> number of GPUs -> bytes. sent: stage -> elements sent per parameter and step, for a last column.
    """
    limit = f", ✓ fits in {format_bytes(capacity)}" if capacity is not None else ""
    gpus = sorted({count for row in cells.values() for count in row})
    counts = [format_things(count, "GPU") for count in gpus]
    title = f"{title} (GB = 1e9 bytes{limit})"
    table = headed(["ZeRO stage"], [*counts, *(["communication"] if sent else [])], title, unit="bytes")
    for stage, row in cells.items():
        held: list[Any] = [row.get(count) for count in gpus]
        if capacity is not None:
            held = [n if n is None else _mark(n <= capacity, format_bytes(n), format_bytes(n)) for n in held]
        table.add_row(str(stage), *held, *([f"{sent[stage] / sent[0]:g} x"] if sent else []))
    return table


def _apart(parts: Sequence[RenderableType]) -> list[RenderableType]:
    """With an empty line between each two."""
    return [piece for i, part in enumerate(parts) for piece in (([_text("")] if i else []) + [part])]


def _head_line(table: FittedTable, shown: str, name: str) -> str:
    """A line of its own for a phase, when it is not the one already `shown`."""
    if name != shown:
        table.add_row(_text(name, "bold"))
    return name


def _size(elements: int, dtype: str) -> str:
    """786,944 bf16: short names, as people write them."""
    return f"{elements:,} {dtype.replace('bfloat', 'bf').replace('float', 'f').replace('int', 'i')}"


def _text(value: str, style: str = "") -> Text:
    """Plain text: names from reports must not be read as rich markup."""
    from rich.text import Text

    return Text(value, style)


def _mark(good: bool, yes: str = "", no: str = "") -> Text:
    text = f"✓ {yes}" if good else f"✗ {no}"
    return _text(text.rstrip(), "green" if good else "bold red")


def _bar(value: int, longest: int, colour: str) -> Text:
    steps = round(8 * _BAR * value / longest) if longest else 0
    steps = max(steps, 1) if value else 0
    return _text(_EIGHTHS[8] * (steps // 8) + _EIGHTHS[steps % 8].strip(), colour)
