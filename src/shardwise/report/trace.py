"""A report's timelines as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format", complete events (ph X) in microseconds. A process is a rank, a thread one of its streams;
where spans of a stream overlap, the stream has several threads, since viewers draw a thread's spans one after another.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import UserError, os_errors
from shardwise.report.exposure import TimeSpan, spans
from shardwise.report.step_report import Role, StepReport
from shardwise.report.strict_json import strict
from shardwise.report.units import format_ranks


def trace_events(report: StepReport) -> dict[str, Any]:
    """The trace as a JSON-ready dictionary.

    A timeline event is {name, stream, start_s, duration_s} with optional args; times are in seconds. A role's timeline
    is drawn once, for its lowest rank. Raises `UserError` when no role has a timeline, or an event is damaged.
    """
    if not any(role.timeline for role in report.roles):
        raise UserError(f"the {report.source} report holds no timeline, so there is nothing to trace")
    events = [event for role in report.roles if role.timeline for event in _role_events(role)]
    about = {"source": report.source, "layout": report.layout, "cluster": report.cluster}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write_trace(report: StepReport, path: Path) -> None:
    """Write the trace as strict JSON (`NaN` and infinity become texts). Raises `UserError` when that fails."""
    text = json.dumps(trace_events(report), allow_nan=False)
    with os_errors(f"write trace {path}"):
        path.write_text(text + "\n")


def _role_events(role: Role) -> Iterator[dict[str, Any]]:
    rank = min(role.ranks)
    shared = f" (as {format_ranks(role.ranks)})" if len(role.ranks) > 1 else ""
    yield _name("process_name", rank, 0, f"rank {rank}{shared}")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    # Viewers want integers as thread ids: they are given out as streams, and further lanes of them, first appear.
    threads: dict[str, int] = {}
    for lane, span in _lanes(spans(role)):
        if lane not in threads:
            threads[lane] = len(threads)
            yield _name("thread_name", rank, threads[lane], lane)
        out: dict[str, Any] = {"ph": "X", "name": span.name, "cat": span.stream}
        out |= {"ts": span.start / 1000, "dur": (span.stop - span.start) / 1000}
        yield (out | ({"args": strict(span.args)} if span.args else {})) | {"pid": rank, "tid": threads[lane]}


def _lanes(timeline: tuple[TimeSpan, ...]) -> Iterator[tuple[str, TimeSpan]]:
    """(lane, span) by start: the stream's name, with a number where an earlier span of the stream has not ended."""
    busy: dict[str, list[int]] = {}
    for span in sorted(timeline, key=lambda span: (span.start, span.stop)):
        ends = busy.setdefault(span.stream, [])
        free = next((i for i, end in enumerate(ends) if end <= span.start), len(ends))
        ends[free : free + 1] = [span.stop]
        yield span.stream if free == 0 else f"{span.stream} {free + 1}", span


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
