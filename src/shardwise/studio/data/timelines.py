"""Timelines as columns, of all ranks of a run, of a step report, or of a Chrome trace."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shardwise.errors import UserError
from shardwise.report.exposure import COMMUNICATION, COMPUTE, DATA, DISK, EMULATED, INJECTED, WAITING, TimeSpan, spans
from shardwise.report.rank_timelines import RankTimelines
from shardwise.report.step_report import StepReport
from shardwise.studio.columns import Columns, Table

KINDS = (
    "forward", "backward", "recompute", "update", "rest", "communication", "waited", "span", "loading", "disk",
    "injected",
)  # fmt: skip
"""Kinds of events, by number."""
_BY_WORD = {"forward": 0, "backward": 1, "recompute": 2, "optimizer": 3, "optimizer:": 3}
_STREAMS = {COMMUNICATION: 5, WAITING: 6, DATA: 8, DISK: 9, INJECTED: 10, EMULATED: 10}
_ORDER = {COMPUTE: 0, COMMUNICATION: 1, WAITING: 2}

MOST_LISTED = 50_000
"""Events up to which there is a table of them."""


class Event(NamedTuple):
    """rank: the row that it is drawn in. start, seconds: seconds."""

    rank: int
    start: float
    seconds: float
    kind: int
    name: str


class DrawnTimeline(NamedTuple):
    """A timeline as it is drawn. rows: what each row is. events: in any order."""

    rows: list[str]
    events: list[Event]

    def to_json(self) -> dict[str, Any]:
        """Rows, kinds and columns, names once each."""
        names = list(dict.fromkeys(event.name for event in self.events))
        number = {name: i for i, name in enumerate(names)}
        columns = {
            "rank": np.array([event.rank for event in self.events], dtype="u2"),
            "start": np.array([event.start for event in self.events]),
            "seconds": np.array([event.seconds for event in self.events]),
            "kind": np.array([event.kind for event in self.events], dtype="u1"),
            "name": np.array([number[event.name] for event in self.events], dtype="u4"),
        }
        return {"rows": self.rows, "kinds": KINDS, "names": names, "columns": columns}

    def table(self) -> Table:
        """Every event as a row, as long as they are not too many."""
        if len(self.events) > MOST_LISTED:
            return Table(f"{len(self.events):,} events: too many for a table", {})
        ordered = sorted(self.events, key=lambda event: (event.rank, event.start))
        columns: Columns = {
            "row": ("", lambda event: self.rows[event.rank]),
            "event": ("", lambda event: event.name),
            "start": ("seconds", lambda event: event.start),
            "takes": ("seconds", lambda event: event.seconds),
        }
        return Table.of("Every event", ordered, columns)


def of_ranks(recorded: RankTimelines) -> DrawnTimeline:
    """A row for each stream of each rank, all on one clock, which begins with the first rank's step."""
    rows: list[str] = []
    events: list[Event] = []
    for one in recorded.ranks:
        place = f"rank {one.rank}" if recorded.hosts == 1 else f"host {one.host} rank {one.rank}"
        # The usual streams first.
        streams = sorted({span.stream for span in one.spans}, key=lambda name: (_ORDER.get(name, len(_ORDER)), name))
        events += _events(one.spans, streams, len(rows), one.start)
        rows += [f"{place} {stream}" for stream in streams]
    return DrawnTimeline(rows, events)


def _events(timeline: tuple[TimeSpan, ...], streams: list[str], first: int, start: int = 0) -> list[Event]:
    """The spans in a row for each stream, from the row `first` on. start: nanoseconds at which their clock begins."""
    return [
        Event(
            first + streams.index(span.stream), (start + span.start) / 1e9, (span.stop - span.start) / 1e9,
            kind_of(span), span.name,
        )
        for span in timeline
    ]  # fmt: skip


def of_report(report: StepReport) -> DrawnTimeline:
    """All roles with a timeline, a row for each stream of each; on one clock, that of the step. Raises `UserError` for
    damaged events."""
    rows: list[str] = []
    events: list[Event] = []
    for role in report.roles:
        streams = list(dict.fromkeys(span.stream for span in spans(role)))
        events += _events(spans(role), streams, len(rows))
        rows += [f"rank {min(role.ranks)} {stream}" for stream in streams]
    return DrawnTimeline(rows, events)


def kind_of(span: TimeSpan) -> int:
    """Index into `KINDS`."""
    if span.stream in _STREAMS:
        return _STREAMS[span.stream]
    return _BY_WORD.get(span.name.partition(" ")[0], 4)


def of_trace(data: Any) -> DrawnTimeline:
    """Complete events (ph X), and pairs of B and E, of a Chrome trace; a row for each thread. Raises `UserError` for
    what is no trace."""
    events = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(events, list) or not all(isinstance(event, Mapping) for event in events):
        raise UserError("this is no Chrome trace: it has no list of traceEvents")
    names: dict[tuple[str, str], str] = {}
    lanes: dict[tuple[str, str], int] = {}
    drawn: list[Event] = []
    open_at: dict[int, list[tuple[float, str]]] = {}
    for event in events:
        phase, thread = event.get("ph"), (str(event.get("pid", 0)), str(event.get("tid", 0)))
        if phase == "M":
            _named(event, thread, names)
        if phase not in ("X", "B", "E"):
            continue
        row, start = lanes.setdefault(thread, len(lanes)), _number(event, "ts")
        if phase == "B":
            open_at.setdefault(row, []).append((start, str(event.get("name", ""))))
        elif phase == "X":
            drawn.append(_event(row, start, _number(event, "dur"), event.get("cat", ""), str(event.get("name", ""))))
        elif open_at.get(row):
            began, name = open_at[row].pop()
            drawn.append(_event(row, began, start - began, event.get("cat", ""), name))
    if not drawn:
        raise UserError("this trace has no event with a duration (ph X, or B and E)")
    first = min(event.start for event in drawn)
    rows = [_row(thread, names) for thread in lanes]
    return DrawnTimeline(rows, [event._replace(start=event.start - first) for event in drawn])


def _event(row: int, start: float, duration: float, category: Any, name: str) -> Event:
    stream = _STREAMS.get(str(category))
    if stream is None and (name.lower().startswith(("nccl", "gloo")) or "allreduce" in name.lower()):
        stream = 5
    return Event(
        row, start / 1e6, duration / 1e6, _BY_WORD.get(name.partition(" ")[0], 7) if stream is None else stream, name
    )


def _named(event: Mapping[str, Any], thread: tuple[str, str], names: dict[tuple[str, str], str]) -> None:
    args = event.get("args")
    if not isinstance(args, Mapping):
        return
    if event.get("name") == "thread_name":
        names[thread] = str(args.get("name", ""))
    elif event.get("name") == "process_name":
        names[thread[0], ""] = str(args.get("name", ""))


def _row(thread: tuple[str, str], names: Mapping[tuple[str, str], str]) -> str:
    process = names.get((thread[0], ""), f"process {thread[0]}")
    return f"{process} {names.get(thread, thread[1])}"


def _number(event: Mapping[str, Any], field: str) -> float:
    value = event.get(field, 0.0)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"this trace is damaged: {field} of {event.get('name')!r} is {value!r}")
    return float(value)
