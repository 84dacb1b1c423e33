"""A report's timelines as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format", complete events (ph X) in microseconds. A process is a rank, a thread one of its streams.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
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
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise UserError(f"cannot write trace {path}: {error.strerror}") from None


def _role_events(role: Role) -> Iterator[dict[str, Any]]:
    rank = min(role.ranks)
    shared = f" (as {format_ranks(role.ranks)})" if len(role.ranks) > 1 else ""
    yield _name("process_name", rank, 0, f"rank {rank}{shared}")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    events = [_complete(role, index, event) for index, event in enumerate(role.timeline)]
    # Viewers want integers as thread ids: streams are numbered as they first appear, and named.
    threads = {stream: tid for tid, stream in enumerate(dict.fromkeys(stream for stream, _ in events))}
    for stream, tid in threads.items():
        yield _name("thread_name", rank, tid, stream)
    for stream, event in sorted(events, key=lambda pair: pair[1]["ts"]):
        yield event | {"pid": rank, "tid": threads[stream]}


def _complete(role: Role, index: int, event: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(stream, the event without process and thread)."""
    place = f"timeline event {index} of role {role.role!r}"
    try:
        name, stream = str(event["name"]), str(event["stream"])
        start, duration = float(event["start_s"]), float(event["duration_s"])
    except KeyError as error:
        raise UserError(f"{place}: {error.args[0]} is missing") from None
    except (TypeError, ValueError):
        raise UserError(f"{place}: start_s and duration_s must be numbers of seconds") from None
    if not (math.isfinite(start) and math.isfinite(duration) and duration >= 0):
        raise UserError(f"{place}: start_s={start} and duration_s={duration} are no span of time")
    out = {"ph": "X", "name": name, "cat": stream, "ts": round(start * 1e6, 3), "dur": round(duration * 1e6, 3)}
    if event.get("args"):
        out["args"] = strict(event["args"])
    return stream, out


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
