"""The time of a measured step: its parts by rank, its collectives and who came last to each, how each was carried, and
the plan beside it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwise.report.exposure import COMPUTE, Exposure, exposure, length, spans, union
from shardwise.report.palette import KINDS
from shardwise.report.step_parts import PARTS, Recording, StepParts
from shardwise.report.step_report import Role, StepReport
from shardwise.report.time_parts import RECORDED, grouped
from shardwise.report.transport import transport_lines
from shardwise.report.units import format_ranks, format_time
from shardwise.report.verdict import Verdict
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
    """Figures "traffic" and "transport" of a measured step, as far as it has recorded them.

    Raises `UserError` when a timeline is damaged.
    """
    tables: dict[str, Table] = {}
    bars: dict[str, list[dict[str, Any]]] = {}
    timed = [(role, exposure(spans(role))) for role in report.roles if role.timeline]
    if timed:
        tables["traffic"] = Table.of_rows(
            "Collectives by operation", _TRAFFIC, [r for one in timed for r in _traffic(*one)]
        )
    carried = [role for role in report.roles if role.transport]
    if carried:
        tables["transport"] = Table.of_rows(
            "How collectives were carried",
            _CARRIED,
            [(min(one.ranks), *line) for one in carried for line in transport_lines(one)],
        )
        bars["transport"] = [bar._asdict() for bar in _transport_bars(carried[0])]
    return TimeFigures(tables, bars)


HOW_TIMED = {
    "ranks": [
        "Each moment of a rank counts once: parts from computing to other time add up to the step.",
        "A rank that stands still in a collective waits for the rank that comes last, and after that for the transfer.",
    ],
    "arrivals": [
        "late: after the median of the others' arrivals; lost: what all others stood still for it until then."
    ],
    "waterfall": [
        "Each part: the mean over the ranks. From the first bar to the last the differences add up.",
        "Planned parts are those of `shardwise estimate`, grouped as a recording divides a step.",
    ],
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

_WORK = ("forward", "backward", "recompute", "update", "rest")
_RANKS = {
    "rank": "", **dict.fromkeys(PARTS.values(), "seconds"), "waiting for": "", "injected": "seconds",
    "behind computation": "seconds", **{KINDS[kind].label: "seconds" for kind in _WORK},
}  # fmt: skip
_ARRIVALS = {"collective": "", "phase": "", "ranks": "", "last": "", "late": "seconds", "lost": "seconds"}
SHOWN = 10
"""Collectives that are drawn."""
_LOOKS = dict(zip(PARTS, ("computing", "core", "transfer", "idle", "disk", "loading", "spare"), strict=True))
"""Part of a rank's step -> its kind in the palette."""
_TRAFFIC = {
    "rank": "", "operation": "", "axes": "", "calls": "count", "payload": "bytes", "time": "seconds",
    "hidden": "seconds", "exposed": "seconds", "of the step": "share",
}  # fmt: skip
_CARRIED = {
    "rank": "", "phase": "", "operation": "", "axes": "", "unit": "", "algorithm": "", "calls": "count",
    "payload": "bytes", "sent": "bytes", "steps": "count", "time": "seconds", "waited": "seconds",
}  # fmt: skip
"""Heading -> unit of each column: the rank, and the fields of a `TransportLine`."""


def step_figures(judged: Verdict, recording: Recording) -> TimeFigures:
    """Figures "ranks" and "arrivals" of a recorded step; "arrivals" alone of an audit, which sees no computing."""
    ranks = judged.parts.ranks
    rows = []
    for one in ranks:
        waits = sorted(one.others.items(), key=lambda wait: -wait[1])
        words = ", ".join(f"rank {rank} {format_time(time / 1e9)}" for rank, time in waits if time * 100 >= one.step)
        parts = (one.of(part) / 1e9 for part in PARTS)
        spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for span in recording[one.rank]:
            if span.stream == COMPUTE:
                spans[timelines.KINDS[timelines.kind_of(span)]].append((span.start, span.stop))
        work = {kind: length(union(times)) for kind, times in spans.items()}
        kinds = (work.get(kind, 0) / 1e9 for kind in _WORK)
        rows.append((one.rank, *parts, words, one.injected / 1e9, exposure(recording[one.rank]).hidden / 1e9, *kinds))
    bars = [
        TimeBar(f"rank {one.rank}", "", one.step / 1e9, [(_LOOKS[p], one.of(p) / 1e9) for p in PARTS], "")
        for one in ranks
    ]
    calls = sorted(judged.parts.arrivals, key=lambda call: -call.lost)
    arrivals = [
        (call.name, call.phase, format_ranks(call.ranks), call.last, call.late / 1e9, call.lost / 1e9) for call in calls
    ]
    computed = any(span.stream == COMPUTE for spans in recording.values() for span in spans)
    tables = {"ranks": Table.of_rows("Time of one step by rank", _RANKS, rows)} if computed else {}
    if arrivals:
        tables["arrivals"] = Table.of_rows("Collectives and who came last, the costliest first", _ARRIVALS, arrivals)
    lost = [
        TimeBar(call.name, f"rank {call.last} came last", call.lost / 1e9, [("idle", call.lost / 1e9)], "")
        for call in calls[:SHOWN]
        if call.lost
    ]
    drawn = {"ranks": bars, "arrivals": lost} if computed else {"arrivals": lost}
    return TimeFigures(tables, {name: [bar._asdict() for bar in bars] for name, bars in drawn.items()})


class Base(NamedTuple):
    """What a step is compared with. name: in words. parts: seconds by `PARTS`."""

    name: str
    parts: Mapping[str, float]

    @classmethod
    def planned(cls, report: StepReport | None) -> "Base | None":
        """The prediction, where it has a time."""
        return Base("planned", grouped(report.timing["parts"], RECORDED)) if report and report.timing else None

    @classmethod
    def recorded(cls, name: str, parts: StepParts) -> "Base":
        return cls(name, {part: parts.mean(part) for part in PARTS})


def waterfall(base: Base | None, parts: StepParts) -> Table:
    """From the base's step to the recorded one, part by part; without a base, from nothing."""
    name, before = base or Base("nothing", {})
    rows: list[tuple[str, float, float, float, float]] = []
    at = sum(before.values())
    if base:
        rows.append((f"step, {name}", at, 0.0, 0.0, at))
    for part, words in PARTS.items():
        planned, measured = before.get(part, 0.0), parts.mean(part)
        if planned or measured:
            rows.append((words, planned, measured, at, at + measured - planned))
            at += measured - planned
    rows.append(("step, recorded", sum(before.values()), at, 0.0, at))
    units = dict.fromkeys(("part", name, "recorded", "from", "to"), "seconds") | {"part": ""}
    return Table.of_rows(
        f"From the step that is {name} to the recorded one" if base else "Parts of the step", units, rows
    )


def _traffic(role: Role, total: Exposure) -> Iterator[tuple[Any, ...]]:
    for kind in total.kinds:
        times = (time / 1e9 for time in (kind.time, kind.hidden, kind.exposed))
        yield min(role.ranks), kind.op, kind.axes, kind.calls, kind.bytes, *times, total.share(kind.exposed)


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
