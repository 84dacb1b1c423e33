"""Calls as spans of a timeline on one clock, for `report.step_parts`: who came last, and how long others waited."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shardwise.audit.calls import MESSAGES, Call
from shardwise.audit.reading import RankRecording
from shardwise.codec import Json
from shardwise.report import step_parts
from shardwise.report.exposure import COMMUNICATION, TimeSpan

Timelines = dict[int, tuple[TimeSpan, ...]]
"""Rank -> its calls."""
_NEVER = 1 << 62
"""Nanoseconds that a call lasts whose end is not known."""


@dataclass(frozen=True)
class LateRank(Json):
    """A rank for which others wait."""

    rank: int
    seconds: float
    """Sum over its calls of how much longer the first of the others had waited."""
    share: float
    """Of the time from the first step to the end."""
    calls: int
    where: str
    """file:line of the calls that are waited for the longest."""


def call_spans(calls: Iterable[Call]) -> tuple[TimeSpan, ...]:
    """Calls with known begins, in nanoseconds of their clock."""
    spans = []
    for call in calls:
        if call.begin is not None:
            begin = round(call.begin * 1e9)
            end = begin + _NEVER if call.end is None else round(call.end * 1e9)
            about = {"op": call.op, "axes": call.comm, "ranks": call.group, "bytes": call.inputs, "where": call.where}
            about |= {"step": call.step, "number": call.number}
            spans.append(TimeSpan(call.op, COMMUNICATION, begin, end, about))
    return tuple(spans)


def matched(timelines: Mapping[int, Sequence[TimeSpan]]) -> list[step_parts.Call]:
    """Collectives that all recorded ranks of a group made, by time; of calls with numbers, only what all have."""
    starts: dict[Any, dict[int, int]] = defaultdict(dict)
    for rank, spans in timelines.items():
        for span in spans:
            starts[span.args["axes"], span.args["ranks"]].setdefault(rank, span.args["number"])
    known = {}
    for rank, spans in timelines.items():
        made = [(span, span.args) for span in spans if span.name not in MESSAGES and len(span.args["ranks"]) > 1]
        known[rank] = [s for s, about in made if about["number"] >= max(starts[about["axes"], about["ranks"]].values())]
    calls = step_parts.matched(known)
    return [call for call in calls if len(call) == len(known.keys() & next(iter(call.values())).args["ranks"])]


def late_ranks(recordings: Sequence[RankRecording]) -> list[LateRank]:
    """Ranks that arrive last at collectives, the one that costs most first. Clocks of several hosts are compared."""
    every = matched({one.rank: call_spans(one.calls) for one in recordings})
    calls = [call for call in every if next(iter(call.values())).args["step"] > 0]
    begins = [span.start for call in calls for span in call.values()]
    if not begins or (whole := (max(begins) - min(begins)) / 1e9) <= 0:
        return []
    by_rank: dict[int, list[step_parts.LateArrivals]] = defaultdict(list)
    for row in step_parts.late_ranks(calls):
        by_rank[row.rank].append(row)
    results = []
    for rank, rows in by_rank.items():
        seconds, where = sum(row.waited for row in rows), max(rows, key=lambda row: row.waited).where
        results.append(LateRank(rank, seconds, seconds / whole, sum(row.calls for row in rows), where))
    return sorted(results, key=lambda one: -one.seconds)


def clock_offsets(timelines: Mapping[int, Sequence[TimeSpan]], hosts: Mapping[int, str]) -> dict[str, int]:
    """Host -> nanoseconds to add to its clock, from ends of collectives, which all ranks of a group leave together.

    hosts: rank -> its host. Only hosts of which a collective with the first one's ranks ended are in the result.
    """
    apart: dict[str, list[float]] = defaultdict(list)
    first = hosts[min(hosts)]
    for call in matched(timelines):
        ends: dict[str, list[int]] = defaultdict(list)
        for rank, span in call.items():
            if span.stop - span.start < _NEVER:
                ends[hosts[rank]].append(span.stop)
        for host in ends.keys() - {first} if first in ends else ():
            apart[host].append(median(ends[first]) - median(ends[host]))
    return {first: 0} | {host: round(median(differences)) for host, differences in apart.items()}
