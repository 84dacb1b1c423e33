"""The time of a measured step: its parts, its collectives by operation, and how each was carried."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from shardwise.report.exposure import COMPUTE, Exposure, exposure, length, spans, union
from shardwise.report.palette import KINDS
from shardwise.report.step_report import Role, StepReport
from shardwise.report.transport import transport_lines
from shardwise.report.units import format_share, format_time
from shardwise.studio.columns import Table
from shardwise.studio.data import timelines


class TimeBar(NamedTuple):
    """One bar of seconds. parts: (kind of the palette, seconds). words: beside the bar, in place of the total."""

    label: str
    detail: str
    total: float
    parts: list[tuple[str, float]]
    words: str


class TimeFigures(NamedTuple):
    """Tables and bars of a step's time, by the name of their figure."""

    tables: dict[str, Table]
    bars: dict[str, list[dict[str, Any]]]


def time_figures(report: StepReport) -> TimeFigures:
    """Figures "time", "traffic" and "transport" of a measured step, as far as it has recorded them.

    Raises `UserError` when a timeline or a transport row is damaged.
    """
    tables: dict[str, Table] = {}
    bars: dict[str, list[dict[str, Any]]] = {}
    timed = [(role, exposure(spans(role))) for role in report.roles if role.timeline]
    if timed:
        tables["time"] = Table.of_rows("Time of one step", _PART, [row for one in timed for row in _part_rows(*one)])
        tables["traffic"] = Table.of_rows(
            "Collectives by operation", _TRAFFIC, [r for one in timed for r in _traffic(*one)]
        )
        bars["time"] = [_part_bar(role, total)._asdict() for role, total in timed]
    carried = [role for role in report.roles if role.transport]
    if carried:
        tables["transport"] = Table.of_rows(
            "How collectives were carried", _CARRIED, [r for one in carried for r in _rows(one)]
        )
        bars["transport"] = [bar._asdict() for bar in _transport_bars(carried[0])]
    return TimeFigures(tables, bars)


HOW_TIMED = {
    "time": ["Time in which the rank computed, and in which only collectives ran; the first rows add up to one step."],
    "traffic": [
        "A collective lasts from its issue to its completion, slower ranks included.",
        "It costs the step what is exposed: the time in which nothing is computed meanwhile.",
    ],
    "transport": [
        "Time from issue to completion in one step, waiting for slower ranks included; identical blocks are joined.",
        "What was hidden behind computation cost the step nothing.",
    ],
}
"""Name of a figure -> how its numbers are measured."""

_PART = {"rank": "", "part": "", "time": "seconds", "of the step": "share"}
_TRAFFIC = {
    "rank": "", "operation": "", "axes": "", "calls": "count", "payload": "bytes", "time": "seconds",
    "hidden": "seconds", "exposed": "seconds", "of the step": "share",
}  # fmt: skip
_CARRIED = {
    "rank": "", "phase": "", "operation": "", "axes": "", "unit": "", "algorithm": "", "calls": "count",
    "payload": "bytes", "sent": "bytes", "steps": "count", "time": "seconds", "waited": "seconds",
}  # fmt: skip
"""Heading -> unit of each column."""


def _compute_parts(role: Role) -> list[tuple[str, int]]:
    """(kind, nanoseconds) of what the rank computed."""
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for span in spans(role):
        if span.stream == COMPUTE:
            by_kind.setdefault(timelines.KINDS[timelines.kind_of(span)], []).append((span.start, span.stop))
    return [(kind, length(union(by_kind[kind]))) for kind in timelines.KINDS if kind in by_kind]


def _part_rows(role: Role, total: Exposure) -> Iterator[tuple[Any, ...]]:
    parts = [(KINDS[kind].label, time) for kind, time in _compute_parts(role)]
    parts += [("communication, exposed", total.exposed), ("neither", total.idle), ("one step", total.step)]
    parts += [("communication, behind computation", total.hidden)]
    for name, time in parts:
        yield min(role.ranks), name, time / 1e9, total.share(time)


def _part_bar(role: Role, total: Exposure) -> TimeBar:
    parts = [*_compute_parts(role), ("communication", total.exposed)]
    words = format_share(total.share(total.exposed))
    return TimeBar(
        f"rank {min(role.ranks)}", format_time(total.step / 1e9), total.step / 1e9,
        [(kind, time / 1e9) for kind, time in parts], words,
    )  # fmt: skip


def _traffic(role: Role, total: Exposure) -> Iterator[tuple[Any, ...]]:
    for kind in total.kinds:
        times = (time / 1e9 for time in (kind.time, kind.hidden, kind.exposed))
        yield min(role.ranks), kind.op, kind.axes, kind.calls, kind.bytes, *times, total.share(kind.exposed)


def _rows(role: Role) -> Iterator[tuple[Any, ...]]:
    for line in transport_lines(role):
        names = (line.phase, line.op, line.axes, line.label, line.algorithm, line.calls, line.payload_bytes)
        yield min(role.ranks), *names, line.bytes_sent, line.steps, line.time_s, line.wait_s


def _transport_bars(role: Role) -> list[TimeBar]:
    sums: dict[tuple[str, str, str], tuple[float, float]] = {}
    for line in transport_lines(role):
        if line.wait_s is not None and line.hidden_s is not None:
            waited, hidden = sums.get((line.op, line.phase, line.axes), (0.0, 0.0))
            sums[line.op, line.phase, line.axes] = (waited + line.wait_s, hidden + line.hidden_s)
    return [
        TimeBar(op, f"{phase}, {axes}", waited + hidden, [("waited", waited), ("hidden", hidden)], "")
        for (op, phase, axes), (waited, hidden) in sums.items()
    ]
