"""Simulated time of a pipeline: makespan, bubble by both definitions, each rank's own span.

The steady state of a long schedule, from a short schedule of the same kind.

With enough micro-batches each rank's list has a beginning, a period that repeats, and an end; more micro-batches repeat
the period more often, so the short schedule passes through every state of the long one. Where a rank holds all
micro-batches of a step (`TokenGenerator.grows`), each of its loops of forwards or backwards has a period of its own.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from shardwise.records import dataclass
from shardwise.schedule.pipeline.action import COMPUTE, Action
from shardwise.schedule.pipeline.flow import flow
from shardwise.schedule.pipeline.plan import PipelineSchedule
from shardwise.schedule.pipeline.registry import find
from shardwise.schedule.pipeline.times import Times

Span = tuple[float, float]


@dataclass(frozen=True)
class Simulated:
    """One step of a schedule in time.

    spans: rank -> (start, end) of each action in seconds; messages and collectives from posting to completion.
    """

    schedule: PipelineSchedule
    times: Times
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def computing(self) -> tuple[tuple[Span, ...], ...]:
        """Rank -> the spans of its computations, in order."""
        return tuple(
            tuple(span for action, span in zip(mine, spans, strict=True) if action[0] in COMPUTE)
            for mine, spans in zip(self.schedule.actions, self.spans, strict=True)
        )

    @cached_property
    def makespan(self) -> float:
        """When the last action of the last rank has ended."""
        return max(end for spans in self.spans for _, end in spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        return tuple(sum(end - start for start, end in spans) for spans in self.computing)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Makespan less `busy`: the bubble of each rank in seconds."""
        return tuple(_left(self.makespan, busy) for busy in self.busy)

    @cached_property
    def own_span(self) -> tuple[float, ...]:
        """Seconds from each rank's first computation to the end of its last: what counts if the ranks did not wait for
        each other between steps."""
        return tuple(spans[-1][1] - spans[0][0] for spans in self.computing)

    @cached_property
    def own_idle(self) -> tuple[float, ...]:
        return tuple(map(_left, self.own_span, self.busy))

    @property
    def bubble(self) -> float:
        """Idle time over ideal: (p - 1) / m for GPipe on equal stages."""
        return sum(self.idle) / sum(self.busy) if sum(self.busy) else 0.0

    @property
    def bubble_of_total(self) -> float:
        """Idle time of the total: (p - 1) / (m + p - 1) for GPipe on equal stages."""
        total = self.makespan * self.schedule.ranks
        return sum(self.idle) / total if total else 0.0


def _left(span: float, busy: float) -> float:
    """Rest of a span, without the rounding of sums."""
    return span - busy if span - busy > 1e-12 * span else 0


def simulate(schedule: PipelineSchedule, times: Times) -> Simulated:
    """Run a schedule in time. It must be right: `verify` tells. Raises `ValueError` where ranks wait for ever."""
    found = flow(schedule, times)
    if found.waiting:
        raise ValueError(f"{schedule.name} deadlocks; verify tells why")
    return Simulated(schedule, times, tuple(tuple(span or (0.0, 0.0) for span in spans) for spans in found.spans))


SETTLED = 6
"""Micro-batches beyond a generator's `settles`, for periods of one: the first periods use buffers that are not
allocated yet. A longer period is long enough for that, and counts as settling."""


class Steady(NamedTuple):
    """A short schedule in place of a long one."""

    micro: int
    """Micro-batches of the short schedule."""
    period: int
    """Micro-batches of one period."""
    repeats: int
    """Periods of the long schedule that the short one leaves out."""
    grows: bool
    """Whether a rank holds more the more micro-batches there are."""


def steady(name: str, p: int, m: int) -> Steady:
    """The short schedule of `name` for p ranks and m micro-batches: of m itself where that is short, or no period is
    known."""
    found = find(name)
    if found.settles is None:
        return Steady(m, 1, 0, found.grows)
    period = found.period(p, m)
    settled = found.settles * max(p, period) + (SETTLED if period == 1 else 0)
    repeats = max(0, m - settled) // period
    return Steady(m - repeats * period, period, repeats, found.grows)


def continuation(short: Sequence[Action], longer: Sequence[Action]) -> list[int]:
    """For each action of a rank in `short` its place in `longer`, which has a period more in the middle of each loop.

    What is linear in the number of micro-batches at all of these actions is so in between.
    """
    a, b = [[_apart_from_micro(action) for action in actions] for actions in (short, longer)]
    at_ends = _matches(a, b)
    at_starts = [len(b) - 1 - j for j in reversed(_matches(a[::-1], b[::-1]))]
    found: list[int] = []
    # In a loop the two are a period apart; neighboring loops differ in how many periods came before.
    for _, group in groupby(range(len(a)), lambda i: (at_ends[i] - i, at_starts[i] - i)):
        places = list(group)
        half = len(places) // 2
        found += [at_ends[i] for i in places[:half]] + [at_starts[i] for i in places[half:]]
    return found


def _apart_from_micro(action: Action) -> Any:
    return action.kind, action.stage, action.peer, tuple((part.kind, part.stage) for part in action.parts)


def _matches(short: list[Any], longer: list[Any]) -> list[int]:
    found: list[int] = []
    at = 0
    for index, action in enumerate(short):
        if longer[at] != action:
            # The shortest block that repeats what precedes it, after which both continue equally.
            at += next(
                length
                for length in range(1, at + 1)
                if longer[at : at + length] == longer[at - length : at]
                and longer[at + length : at + 2 * length][: len(short) - index] == short[index : index + length]
            )
        found.append(at)
        at += 1
    assert len(longer) - at == 0 or longer[at:] == longer[2 * at - len(longer) : at]
    return found
