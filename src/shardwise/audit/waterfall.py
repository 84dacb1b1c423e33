"""Where the time of a step went: parts of one rank's window that add up to it, to the nanosecond, each with its cause.

An instant belongs to the first class that covers it: computing, copies, collectives in order of their end (exposed:
nothing else ran), data loading, other work of the host, nothing recorded. What was spent in a collective before its
last rank came is waiting for that rank.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.codec import Json
from shardwise.report.exposure import Intervals, TimeSpan, length, overlap, union, without
from shardwise.report.step_parts import Call, ended_by, last_arrival
from shardwise.report.time_parts import grouped
from shardwise.report.units import format_ranks

COMPUTING, COPIES, COMMUNICATION, WAITING, LOADING, HOST, IDLE = CLASSES = (
    "computing", "copies", "communication", "waiting", "data loading", "host", "idle",
)  # fmt: skip

_CAUSES = {
    COMPUTING: "operations of the model and the optimizer",
    COPIES: "copies and fills of device memory that computing does not hide",
    LOADING: "the device is idle while the host loads data",
    HOST: "the device is idle while the host launches operations",
    IDLE: "the device is idle, and the host runs no recorded operation: Python, or it sleeps",
}


@dataclass(frozen=True)
class StepPart(Json):
    """Time of one cause in one step of one rank."""

    group: str
    """One of `CLASSES`."""
    name: str
    time: int
    """Nanoseconds."""
    cause: str


@dataclass(frozen=True)
class Waterfall(Json):
    """A step of one rank; `parts` add up to `time`."""

    rank: int
    step: str
    time: int
    """Nanoseconds."""
    parts: tuple[StepPart, ...]


def waterfall(
    rank: int, step: str, window: tuple[int, int], spans: Mapping[str, Iterable[tuple[int, int]]],
    timeline: Sequence[TimeSpan], calls: Sequence[Call] = (), device: bool = True, offset: int = 0,
) -> Waterfall:  # fmt: skip
    """The parts of a window.

    spans: nanoseconds of "compute", "copies", "loading" and "host". timeline: the rank's collectives and messages on
    one clock with `calls` (made by all of their ranks), which is `offset` nanoseconds ahead of the spans'.
    device: whether computing is a device's.
    """
    left: Intervals = [window]
    parts = []

    def take(group: str, intervals: Iterable[tuple[int, int]], cause: str) -> None:
        nonlocal left
        covered = overlap(left, union(intervals))
        if covered:
            left = without(left, covered)
            parts.append(StepPart(group, group, length(covered), cause))

    for group, key in ((COMPUTING, "compute"), (COPIES, "copies")):
        take(group, spans.get(key, ()), _CAUSES[group] if device or group != COMPUTING else "operations of the host")
    under_way = union((span.start - offset, span.stop - offset) for span in timeline)
    parts += _collectives(rank, timeline, calls, [(a + offset, b + offset) for a, b in overlap(left, under_way)])
    left = without(left, under_way)
    for group, key in ((LOADING, "loading"), (HOST, "host")):
        take(group, spans.get(key, ()), _CAUSES[group])
    take(IDLE, left, _CAUSES[IDLE] if device else "the host runs no recorded operation: Python, or it sleeps")
    return Waterfall(rank, step, window[1] - window[0], tuple(parts))


def _collectives(rank: int, timeline: Sequence[TimeSpan], calls: Sequence[Call], left: Intervals) -> Iterator[StepPart]:
    """Of each kind of collective the transfer, and the waiting by rank."""
    times: Counter[tuple[str, str, str]] = Counter()
    for span, number, before, after in ended_by(rank, timeline, calls, left):
        over = f" over {format_ranks(span.args['ranks'])}" if span.args["ranks"] else ""
        if number is not None and before:
            last, _ = last_arrival(calls[number])
            times[WAITING, f"waiting for rank {last}", f"rank {last} came last to {span.name}{over}"] += before
        times[COMMUNICATION, span.name, f"{span.name}{over} that nothing hides"] += after
    ordered = sorted(times.items(), key=lambda item: CLASSES.index(item[0][0]))
    return (StepPart(group, name, time, cause) for (group, name, cause), time in ordered if time)


# -- Planned -> measured


@dataclass(frozen=True)
class Bar(Json):
    """One class, averaged over steps and ranks; seconds per step."""

    group: str
    planned: float | None
    measured: float
    parts: tuple[tuple[str, float, str], ...]
    """(name, seconds, cause) of the measured time, the longest first."""


def bars(waterfalls: Sequence[Waterfall], planned: Mapping[str, float] | None = None) -> tuple[Bar, ...]:
    """Classes in order; the measured times add up to the mean step's, the planned ones to the plan's.

    planned: seconds by the parts of `time_parts.STEP`.
    """
    of_plan = _of_plan(planned) if planned is not None else None
    sums: dict[str, dict[tuple[str, str], int]] = {group: defaultdict(int) for group in CLASSES}
    for one in waterfalls:
        for part in one.parts:
            sums[part.group][part.name, part.cause] += part.time
    rows = []
    for group, parts in sums.items():
        plan = None if of_plan is None else of_plan.get(group, 0.0)
        if waterfalls and (parts or plan):
            mean = {key: time / len(waterfalls) / 1e9 for key, time in parts.items()}
            ordered = sorted(((name, seconds, cause) for (name, cause), seconds in mean.items()), key=lambda p: -p[1])
            rows.append(Bar(group, plan, sum(mean.values()), tuple(ordered)))
    return tuple(rows)


def _of_plan(parts: Mapping[str, float]) -> dict[str, float]:
    groups, host = grouped(parts), parts.get("host", 0.0)
    return {
        COMPUTING: groups["compute"],
        COMMUNICATION: groups["communication"],
        WAITING: groups["bubble"] + groups["waiting"] - host,
        HOST: host,
    }
