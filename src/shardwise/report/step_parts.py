"""Time of a recorded step by rank: computing, transfers that nothing hides, and waiting, and for whom.

A collective ends when its last rank has come and the bytes have moved. Time that a rank stands still in it before the
last one has arrived is waiting for that rank; the rest is the transfer.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median
from typing import Any

from shardwise.codec import Json
from shardwise.report.exposure import (
    COMMUNICATION,
    COMPUTE,
    DATA,
    DISK,
    EMULATED,
    INJECTED,
    WAITING,
    Intervals,
    TimeSpan,
    length,
    overlap,
    union,
    without,
)

Recording = Mapping[int, Sequence[TimeSpan]]
"""Rank -> its spans of one step, all on one clock in nanoseconds. Streams: those of `report.exposure`. A collective
without `ranks` in its args is one of all ranks."""

PARTS = {
    "computing": "computing",
    "core": "ready, without a core",
    "transfer": "transfers that nothing hides",
    "others": "waiting for other ranks",
    "disk": "waiting for the disk",
    "data": "loading text",
    "rest": "other time",
}
"""Parts of a rank's step, in words."""


@dataclass(frozen=True)
class LastArrival(Json):
    """One collective of the ranks that joined it.

    last: the rank that came last. late: nanoseconds after the median of the others. lost: nanoseconds that the others
    stood still for it until then, all together.
    """

    json_keys = "name phase ranks last late_s=late_seconds lost_s=lost_seconds"

    name: str
    phase: str
    ranks: tuple[int, ...]
    last: int
    late: int
    lost: int

    @classmethod
    def of(cls, call: "Call", lost: int) -> "LastArrival":
        last, moment = last_arrival(call)
        others = [span.start for rank, span in call.items() if rank != last]
        late = max(0, moment - round(median(others)))
        phase = str(call[last].args.get("phase", ""))
        return cls(call[last].name, phase, tuple(sorted(call)), last, late, lost)

    @property
    def late_seconds(self) -> float:
        return self.late / 1e9

    @property
    def lost_seconds(self) -> float:
        return self.lost / 1e9


@dataclass(frozen=True)
class RankParts:
    """Nanoseconds of one rank's step by `PARTS`; they add up to the step of all ranks.

    others: rank -> how long this one waited for it. transfers: (operation, axes) -> exposed transfers. injected: the
    waiting that `--slow` and `--emulate` injected, which is in `computing`, too.
    """

    rank: int
    step: int
    computing: int
    core: int
    data: int
    disk: int
    others: dict[int, int]
    transfers: dict[tuple[str, str], int]
    injected: int

    def of(self, part: str) -> int:
        if part == "rest":
            return self.step - sum(self.of(name) for name in PARTS if name != "rest")
        sums = {"others": sum(self.others.values()), "transfer": sum(self.transfers.values())}
        return sums[part] if part in sums else int(getattr(self, part))

    def seconds(self) -> dict[str, Any]:
        """Times in seconds, for JSON."""
        parts = {f"{name}_s": self.of(name) / 1e9 for name in PARTS}
        waits = {str(rank): time / 1e9 for rank, time in sorted(self.others.items())}
        return {"rank": self.rank, **parts, "waiting_for": waits, "injected_s": self.injected / 1e9}


@dataclass(frozen=True)
class StepParts:
    """One step of all recorded ranks. step: nanoseconds from the first rank's start to the last one's end."""

    step: int
    ranks: tuple[RankParts, ...]
    arrivals: tuple[LastArrival, ...]

    def mean(self, part: str) -> float:
        """Seconds of a part, the mean over the ranks; those of all parts add up to the step."""
        return sum(one.of(part) for one in self.ranks) / len(self.ranks) / 1e9 if self.ranks else 0.0


Call = dict[int, TimeSpan]
"""Rank -> its part in one collective."""


@dataclass(frozen=True)
class LateArrivals(Json):
    """A rank for which others waited at one kind of call: operation, bytes and line (args "op", "bytes", "where")."""

    rank: int
    op: str
    nbytes: int
    where: str
    """Line of the call, "" where unknown."""
    calls: int
    """Those to which the rank came last."""
    late: float
    """Seconds by which it came after the rank before it, of all calls: what the job would have gained otherwise."""
    waited: float
    """Sum of the longest waits for it, in seconds."""


def late_ranks(calls: Sequence[Call]) -> list[LateArrivals]:
    """Ranks and kinds of calls by the time that others lost there, the most first."""
    kinds: defaultdict[tuple[int, str, int, str], list[tuple[int, int]]] = defaultdict(list)
    for call in calls:
        last, moment = last_arrival(call)
        about, before = call[last].args, max(span.start for rank, span in call.items() if rank != last)
        kind = last, call[last].kind[0], int(about.get("bytes", 0)), str(about.get("where", ""))
        kinds[kind].append((max(0, moment - before), max(waits(call).values())))
    rows = [
        LateArrivals(*kind, len(some), sum(late for late, _ in some) / 1e9, sum(longest for _, longest in some) / 1e9)
        for kind, some in kinds.items()
    ]
    return sorted(rows, key=lambda row: -row.late)


def waits(call: Call) -> dict[int, int]:
    """Rank -> nanoseconds from its begin until the last one came, at most until its end."""
    _, moment = last_arrival(call)
    return {rank: max(0, min(moment, span.stop) - span.start) for rank, span in call.items()}


def step_parts(recording: Recording) -> StepParts:
    """Divide the time of each rank. A recording without spans gives none."""
    begin = min((span.start for spans in recording.values() for span in spans), default=0)
    end = max((span.stop for spans in recording.values() for span in spans), default=0)
    calls = matched(recording)
    lost: defaultdict[int, int] = defaultdict(int)
    ranks = []
    for rank, timeline in recording.items():
        busy = [*_union(timeline, COMPUTE), *_union(timeline, DATA), *_for_disk(timeline)]
        left = without(_union(timeline, COMMUNICATION), union(busy))
        others: dict[int, int] = {}
        transfers: dict[tuple[str, str], int] = {}
        for span, number, before, after in ended_by(rank, timeline, calls, left):
            if number is not None and before:
                last, _ = last_arrival(calls[number])
                others[last] = others.get(last, 0) + before
                lost[number] += before
            transfers[span.kind] = transfers.get(span.kind, 0) + after
        ranks.append(_parts(rank, timeline, end - begin, others, transfers))
    return StepParts(end - begin, tuple(ranks), tuple(LastArrival.of(call, lost[i]) for i, call in enumerate(calls)))


def matched(recording: Recording) -> list[Call]:
    """The collectives and messages that at least two recorded ranks joined, in the order of their last arrivals: the
    n-th of a kind on one rank is the n-th of this kind on every other."""
    joined: dict[tuple[Any, ...], Call] = {}
    counts: defaultdict[tuple[Any, ...], int] = defaultdict(int)
    for rank, timeline in recording.items():
        calls = [span for span in timeline if span.stream == COMMUNICATION]
        for span in sorted(calls, key=lambda span: span.start):
            op = "message" if span.kind[0] in ("send", "recv") else span.kind[0]
            of = (op, *(str(span.args.get(name, "")) for name in ("axes", "unit", "phase")))
            group = tuple(span.args.get("ranks", sorted(recording)))
            counts[rank, group, of] += 1
            joined.setdefault((group, of, counts[rank, group, of]), {})[rank] = span
    shared = [call for call in joined.values() if len(call) > 1]
    return sorted(shared, key=lambda call: max(span.start for span in call.values()))


def last_arrival(call: Call) -> tuple[int, int]:
    """(rank, moment) of the last arrival; of a message, of who sends it."""
    sent = {rank: span.start for rank, span in call.items() if span.kind[0] == "send"}
    starts = sent or {rank: span.start for rank, span in call.items()}
    last = max(starts, key=lambda rank: starts[rank])
    return last, starts[last]


def ended_by(
    rank: int, timeline: Sequence[TimeSpan], calls: Sequence[Call], left: Intervals
) -> Iterator[tuple[TimeSpan, int | None, int, int]]:
    """Divide a union of times in which a rank only communicates: each moment is of the collective that ends it.

    Yields (span, its place in `calls` or None, nanoseconds before its last rank came, nanoseconds after that).
    """
    mine = {id(call[rank]): i for i, call in enumerate(calls) if rank in call}
    under_way = [span for span in timeline if span.stream == COMMUNICATION]
    left = list(left)
    for span in sorted(under_way, key=lambda span: span.stop):
        first = bisect_left(left, span.start, key=itemgetter(1))
        after = bisect_left(left, span.stop, key=itemgetter(0))
        whole = [(span.start, span.stop)]
        still = overlap(left[first:after], whole)
        left[first:after] = without(left[first:after], whole)
        if not still:
            continue
        number, before = mine.get(id(span)), 0
        if number is not None:
            last, moment = last_arrival(calls[number])
            before = length(overlap(still, [(span.start, max(span.start, moment))])) if last != rank else 0
        yield span, number, before, length(still) - before


def _parts(
    rank: int, timeline: Sequence[TimeSpan], step: int, others: dict[int, int], transfers: dict[tuple[str, str], int]
) -> RankParts:
    compute = _union(timeline, COMPUTE)
    # Emulated arithmetic ends when it would have, however long it has waited for a core.
    core = core_wait(span for span in timeline if span.stream == COMPUTE) - length(_union(timeline, EMULATED))
    core = min(length(compute), max(0, core))
    disk = without(_for_disk(timeline), union([*compute, *_union(timeline, DATA)]))
    data = length(without(_union(timeline, DATA), compute))
    injected = length(_union(timeline, INJECTED)) + length(_union(timeline, EMULATED))
    return RankParts(rank, step, length(compute) - core, core, data, length(disk), others, transfers, injected)


def _for_disk(timeline: Sequence[TimeSpan]) -> Intervals:
    return union((span.start, span.stop) for span in timeline if (span.stream, span.name) == (WAITING, f"for {DISK}"))


def core_wait(spans: Iterator[TimeSpan]) -> int:
    """Nanoseconds for which the rank was ready to compute and had no core."""
    return sum(round(float(span.args.get("core_wait_s", 0.0)) * 1e9) for span in spans)


def _union(timeline: Sequence[TimeSpan], stream: str) -> Intervals:
    return union((span.start, span.stop) for span in timeline if span.stream == stream)
