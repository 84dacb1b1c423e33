"""How the bubble shrinks with more micro-batches, and how many a wanted bubble takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from shardwise.errors import UserError
from shardwise.schedule.pipeline.plan import PipelineSchedule
from shardwise.schedule.pipeline.registry import build, find
from shardwise.schedule.pipeline.simulate import Simulated, simulate
from shardwise.schedule.pipeline.times import Times

Timing = Callable[[PipelineSchedule], Times]
"""What a schedule's actions take."""

MOST_MICRO = 4096
"""Micro-batches up to which a wanted bubble is looked for."""


def simulated(name: str, p: int, m: int, v: int, timing: Timing, **options: int) -> Simulated:
    """A schedule in time. Raises what `build` raises."""
    schedule = build(name, p, m, v, **options)  # type: ignore[arg-type]
    return simulate(schedule, timing(schedule))


def curve(name: str, p: int, v: int, micro: list[int], timing: Timing, **options: int) -> list[tuple[int, Simulated]]:
    """(m, the schedule in time) for those of the numbers of micro-batches that it is for."""
    legal = [m for m in micro if not find(name).objection(p, m, v)]
    return [(m, simulated(name, p, m, v, timing, **options)) for m in legal]


def least_micro(name: str, p: int, v: int, wanted: float, timing: Timing, **options: int) -> int | None:
    """The least number of micro-batches whose bubble is at most `wanted` of the total time; None above `MOST_MICRO`.

    Looked for by halves: idle time hardly grows with m, work does. Raises `UserError` where no m is legal.
    """
    legal = [m for m in range(1, MOST_MICRO + 1) if not find(name).objection(p, m, v)]
    if not legal:
        raise UserError(f"{find(name).name} cannot have p={p}, v={v}: {find(name).objection(p, p, v)}")

    @cache
    def good(at: int) -> bool:
        # A little slack: (p - 1) / (m + p - 1) of the total is met by the m that gives just that.
        return simulated(name, p, legal[at], v, timing, **options).bubble_of_total <= wanted * (1 + 1e-9)

    low, high = -1, 0
    while high < len(legal) - 1 and not good(high):
        low, high = high, min(2 * high + 1, len(legal) - 1)
    if not good(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return legal[high]
