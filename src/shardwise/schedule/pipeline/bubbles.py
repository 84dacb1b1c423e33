"""The bubble by number of micro-batches, and the number for a requested bubble."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import isqrt
from typing import NamedTuple

from shardwise.errors import UserError
from shardwise.schedule.pipeline.plan import PipelineSchedule
from shardwise.schedule.pipeline.registry import build, find
from shardwise.schedule.pipeline.simulate import Simulated, simulate
from shardwise.schedule.pipeline.times import Times

Timing = Callable[[PipelineSchedule], Times]
"""Times of a schedule's actions."""

MOST_MICRO = 4096
"""Micro-batches up to which a wanted bubble is looked for."""

UNSTEADY = {"zb-v"}
"""Schedules whose idle time goes up and down with m where F, I and W differ, even if messages take no time."""

LARGEST, TRIED = 100_000, 200_000
"""Forward passes of the largest schedule that is made for it, and of all that are tried one by one: seconds each."""


def simulated(name: str, p: int, m: int, v: int, timing: Timing, **options: int) -> Simulated:
    """A schedule in time. Raises what `build` raises."""
    schedule = build(name, p, m, v, **options)  # type: ignore[arg-type]
    return simulate(schedule, timing(schedule))


def curve(name: str, p: int, v: int, micro: list[int], timing: Timing, **options: int) -> list[tuple[int, Simulated]]:
    """(m, the schedule in time) for those of the numbers of micro-batches that it is for."""
    legal = [m for m in micro if not find(name).objection(p, m, v)]
    return [(m, simulated(name, p, m, v, timing, **options)) for m in legal]


class LeastMicroBatches(NamedTuple):
    """Smallest number of micro-batches for a bubble. micro: the least number of micro-batches for a bubble, None where
    there is none up to `most`. tried: where they are fewer than `micro`, smaller numbers than it were tried one by one
    only up to there."""

    micro: int | None
    tried: int
    most: int


def least_micro(name: str, p: int, v: int, wanted: float, timing: Timing, **options: int) -> LeastMicroBatches:
    """The least number of micro-batches whose bubble is at most `wanted` of the total time.

    Where messages take no time idle time does not grow with m, and it is looked for by halves. Where they take some, of
    an `UNSTEADY` schedule, and where gradients leave early, bubbles go up and down with m: as many numbers as `TRIED`
    allows are tried one after the other, those beyond by halves. Raises `UserError` where no m is legal.
    """
    most = max(p, min(MOST_MICRO, LARGEST // (p * v)))
    legal = [m for m in range(1, most + 1) if not find(name).objection(p, m, v)]
    if not legal:
        raise UserError(f"{find(name).name} cannot have p={p}, v={v}: {find(name).objection(p, p, v)}")

    @cache
    def good(at: int) -> bool:
        # A little slack: (p - 1) / (m + p - 1) of the total is met by the m that gives just that.
        return simulated(name, p, legal[at], v, timing, **options).bubble_of_total <= wanted * (1 + 1e-9)

    low = -1
    hop = timing(build(name, p, legal[0], v, **options)).hop  # type: ignore[arg-type]
    if hop or find(name).name in UNSTEADY or options.get("early"):
        one_by_one = isqrt(2 * TRIED // (p * v))
        while low < len(legal) - 1 and legal[low + 1] <= one_by_one:
            if good(low + 1):
                return LeastMicroBatches(legal[low + 1], most, most)
            low += 1
    tried = legal[low] if low >= 0 else most
    high = low + 1
    while high < len(legal) - 1 and not good(high):
        low, high = high, min(2 * high + 1, len(legal) - 1)
    if high == len(legal) or not good(high):
        return LeastMicroBatches(None, tried, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return LeastMicroBatches(legal[high], tried, most)
