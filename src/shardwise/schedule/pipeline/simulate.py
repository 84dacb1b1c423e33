"""Simulated time of a pipeline: makespan, bubble by both definitions, each rank's own span."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwise.schedule.pipeline.action import COMPUTE
from shardwise.schedule.pipeline.flow import flow
from shardwise.schedule.pipeline.plan import PipelineSchedule
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
        """Seconds in which each rank computes."""
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
        """Own span less `busy`."""
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
