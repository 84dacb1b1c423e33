"""Analysis of a timeline: how long the rank computed, and how much communication was not hidden behind that.

Spans are counted in whole nanoseconds, so that parts add up to the whole.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from shardwise.errors import UserError
from shardwise.report.step_report import Role, StepReport
from shardwise.report.units import format_share

COMPUTE, COMMUNICATION, WAITING = STREAMS = ("compute", "communication", "waiting")
"""The streams of a timeline: what the rank computes; each collective from its issue to its completion; when the rank
stands still for one, or for a disk."""

DATA, DISK, INJECTED, EMULATED = "data", "disk", "injected", "emulated"
"""Further streams: loading a step's text; reads and writes of offloaded state, beside what the rank computes; waiting
that `--slow` injects, and what is left of the time that `--emulate` gives to arithmetic, which the compute stream has,
too."""

LONGEST = 1e12
"""Seconds that an event of a timeline may begin after its step, and last."""

Intervals = list[tuple[int, int]]
"""(start, stop) in nanoseconds."""


@dataclass(frozen=True)
class TimeSpan:
    """One event of a timeline. start and stop: nanoseconds since the step began."""

    name: str
    stream: str
    start: int
    stop: int
    args: dict[str, Any]

    def later(self, nanoseconds: int) -> "TimeSpan":
        return replace(self, start=self.start + nanoseconds, stop=self.stop + nanoseconds)

    @property
    def kind(self) -> tuple[str, str]:
        """(operation, axes) of a collective; a span that tells neither goes by its name."""
        return str(self.args.get("op", self.name)), str(self.args.get("axes", ""))


def spans(role: Role) -> tuple[TimeSpan, ...]:
    """The events of a role's timeline, in its order. Raises `UserError` when one of them is damaged."""
    return tuple(_span(event, f"timeline event {i} of role {role.role!r}") for i, event in enumerate(role.timeline))


def _span(event: dict[str, Any], place: str) -> TimeSpan:
    try:
        name, stream = str(event["name"]), str(event["stream"])
        start, duration = float(event["start_s"]), float(event["duration_s"])
    except KeyError as error:
        raise UserError(f"{place}: {error.args[0]} is missing") from None
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{place}: start_s and duration_s must be numbers of seconds") from None
    if not (0 <= start <= LONGEST and 0 <= duration <= LONGEST):
        raise UserError(f"{place}: start_s={start} and duration_s={duration} are no span of time")
    args = event.get("args") or {}
    if not isinstance(args, dict):
        raise UserError(f"{place}: args must be an object")
    nanoseconds = round(start * 1e9)
    return TimeSpan(name, stream, nanoseconds, nanoseconds + round(duration * 1e9), args)


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Disjoint intervals of the same time in ascending order; empty ones vanish."""
    joined: Intervals = []
    for start, stop in sorted(intervals):
        if start >= stop:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def overlap(a: Intervals, b: Intervals) -> Intervals:
    """The time that two unions share."""
    shared: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            shared.append((start, stop))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return shared


def without(a: Intervals, b: Intervals) -> Intervals:
    """The time of the union `a` that is not in the union `b`."""
    edges = sorted([(at, 1) for span in a for at in span] + [(at, 0) for span in b for at in span])
    rest, inside, over = [], False, False
    for (at, of_a), (until, _) in pairwise([*edges, (0, 0)]):
        inside, over = inside ^ bool(of_a), over ^ (not of_a)
        if inside and not over and at < until:
            rest.append((at, until))
    return rest


def length(intervals: Intervals) -> int:
    """Nanoseconds in a union."""
    return sum(stop - start for start, stop in intervals)


@dataclass(frozen=True)
class KindOfTraffic:
    """All collectives of one operation over the same axes, in one step of one rank.

    bytes: their payloads, full tensors. time: nanoseconds in which at least one was under way; exposed: those of them
    in which nothing was computed. Kinds overlap each other, so their times may add up to more than the step's.
    """

    op: str
    axes: str
    calls: int
    bytes: int
    time: int
    exposed: int

    @property
    def hidden(self) -> int:
        return self.time - self.exposed


@dataclass(frozen=True)
class Exposure:
    """Time of one step of one rank by kind, in nanoseconds; `compute + exposed + idle == step`.

    step: from the start to the end of the last span. compute: the rank computed (the union of the compute spans).
    communication: at least one collective was under way (the union of the communication spans; each lasts from issue
    to completion, waiting for slower ranks included). exposed: the part of it in which the rank computed nothing, which
    is what communication costs the step. hidden: the rest of it, behind computation. waiting: the rank stood still for
    a collective (the union of the waiting spans). idle: neither computing nor communicating.
    """

    step: int
    compute: int
    communication: int
    exposed: int
    waiting: int
    kinds: tuple[KindOfTraffic, ...]

    @property
    def hidden(self) -> int:
        return self.communication - self.exposed

    @property
    def idle(self) -> int:
        return self.step - self.compute - self.exposed

    def share(self, part: int) -> float:
        return part / self.step if self.step else 0.0

    def sentence(self, rank: int) -> str:
        """One line for the end of a run; all shares are of the step, and the latter two add up to the first."""
        total, hidden, exposed = (
            format_share(self.share(part)) for part in (self.communication, self.hidden, self.exposed)
        )
        return f"communication: {total} of the step, {hidden} hidden, {exposed} exposed (rank {rank})"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary, times in seconds, `exposed_share` as a fraction of the step."""
        names = ("step", "compute", "communication", "hidden", "exposed", "waiting", "idle")
        kinds = [
            {"op": k.op, "axes": k.axes, "calls": k.calls, "bytes": k.bytes}
            | {"time_s": k.time / 1e9, "hidden_s": k.hidden / 1e9, "exposed_s": k.exposed / 1e9}
            for k in self.kinds
        ]
        times = {f"{name}_s": getattr(self, name) / 1e9 for name in names}
        return times | {"exposed_share": self.share(self.exposed), "kinds": kinds}


def exposure(timeline: Iterable[TimeSpan]) -> Exposure:
    """The figures of one rank's timeline. A timeline without spans gives zeros."""
    timeline = list(timeline)
    compute, under_way, waiting = (union((s.start, s.stop) for s in timeline if s.stream == name) for name in STREAMS)
    by_kind: dict[tuple[str, str], list[TimeSpan]] = {}
    for span in timeline:
        if span.stream == COMMUNICATION:
            by_kind.setdefault(span.kind, []).append(span)
    return Exposure(
        step=max((span.stop for span in timeline), default=0),
        compute=length(compute),
        communication=length(under_way),
        exposed=length(under_way) - length(overlap(under_way, compute)),
        waiting=length(waiting),
        kinds=tuple(_kind(*kind, result, compute) for kind, result in by_kind.items()),
    )


def _kind(op: str, axes: str, timeline: list[TimeSpan], compute: Intervals) -> KindOfTraffic:
    under_way = union((span.start, span.stop) for span in timeline)
    time, hidden = length(under_way), length(overlap(under_way, compute))
    sizes = [span.args.get("bytes") for span in timeline]
    payload = sum(size for size in sizes if isinstance(size, int))
    return KindOfTraffic(op, axes, len(timeline), payload, time, time - hidden)


def exposures(report: StepReport) -> tuple[tuple[int, Exposure], ...]:
    """(lowest rank, figures) of each role that has a timeline. Raises `UserError` when a timeline is damaged."""
    return tuple((min(role.ranks), exposure(spans(role))) for role in report.roles if role.timeline)
