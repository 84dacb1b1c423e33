"""The textbook bubbles and peaks of pipelines, and where they hold.

p ranks, m micro-batches, v chunks a rank; F, I, W are what a rank takes for all its chunks of one micro-batch, and B is
I + W.
Messages take no time. Nothing here knows the schedules: tests hold the two against each other.

Sources: Huang et al. 2019; Narayanan et al. 2019 and 2021; Lamy-Poirier 2022; Qi et al. 2023 and 2024 (their "B" is I);
DeepSeek-AI 2024, whose p counts the stages of a V, two a rank.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import isqrt
from typing import NamedTuple

import numpy as np

from shardwise.errors import UserError
from shardwise.records import dataclass
from shardwise.schedule.pipeline.plan import PipelineSchedule
from shardwise.schedule.pipeline.registry import build, find
from shardwise.schedule.pipeline.simulate import Simulated, simulate
from shardwise.schedule.pipeline.times import Times


class PipelineShape(NamedTuple):
    """Arguments of a pipeline formula."""

    p: int
    m: int
    v: int
    F: float
    I: float  # noqa: E741
    W: float

    @property
    def B(self) -> float:
        return self.I + self.W


@dataclass(frozen=True)
class PipelineFormula:
    """One schedule's formulas. text: the bubble's, in words. note: where they hold, in words.

    bubble: idle seconds of the rank that has most, up to the makespan; with `own`, those of the rank's own span, from
    its first computation to the end of its last. exact: where it is just that; below: where, if not, it is at least a
    lower bound. peak: (p, m, v, rank) -> micro-batches that a rank holds at most, in shares of all its chunks. full:
    p -> the m from which on the peak is exact; with fewer micro-batches it is an upper bound.
    """

    text: str
    bubble: Callable[[PipelineShape], float]
    peak: Callable[[int, int, int, int], float]
    note: str = ""
    exact: Callable[[PipelineShape], bool] = lambda c: True
    below: Callable[[PipelineShape], bool] = lambda c: False
    own: bool = False
    full: Callable[[int], int] = lambda p: 1


def _ramp(c: PipelineShape) -> float:
    return (c.p - 1) * (c.F + c.B)


def _interleaved_peak(p: int, m: int, v: int, r: int) -> float:
    group = m // max(1, m // p)
    return min(m * v, 2 * (p - 1 - r) + (v - 1) * group + 1) / v


_FORWARD_ONLY = PipelineFormula("(p-1)F", lambda c: (c.p - 1) * c.F, lambda p, m, v, r: 0)
_INTERLEAVED = PipelineFormula(
    "(p-1)(F+B)/v",
    lambda c: _ramp(c) / c.v,
    _interleaved_peak,
    "m of at least p; with less, a lower bound",
    exact=lambda c: c.m >= c.p,
    below=lambda c: True,
)
FORMS = {
    "naive": PipelineFormula("m(p-1)(F+B)", lambda c: c.m * _ramp(c), lambda p, m, v, r: 1),
    "gpipe": PipelineFormula("(p-1)(F+B)", _ramp, lambda p, m, v, r: m),
    "1f1b": PipelineFormula("(p-1)(F+B)", _ramp, lambda p, m, v, r: min(m, p - r), "with the least warm-up"),
    "interleaved": _INTERLEAVED,
    "breadth-first": replace(_INTERLEAVED, peak=lambda p, m, v, r: m),
    "zb-h1": replace(
        _INTERLEAVED,
        text="(p-1)(F+I-min(F,I,W))",
        bubble=lambda c: (c.p - 1) * (c.F + c.I - np.minimum(np.minimum(c.F, c.I), c.W)),
        peak=lambda p, m, v, r: min(m, p),
    ),
    "zb-h2": PipelineFormula(
        "(p-1)(F+I-2W), own span",
        lambda c: (c.p - 1) * (c.F + c.I - 2 * c.W),
        lambda p, m, v, r: min(m, 2 * p - 1),
        "m of at least 2p - 1, W at most F and the mean of F and I; else a lower bound",
        exact=lambda c: c.m >= 2 * c.p - 1 and c.W <= c.F and 2 * c.W <= c.F + c.I,
        below=lambda c: True,
        own=True,
    ),
    "zb-v": PipelineFormula(
        "0, own span",
        lambda c: 0,
        lambda p, m, v, r: min(m, p),
        "m of at least 2p - 1, F = I = W; else a lower bound",
        exact=lambda c: c.m >= 2 * c.p - 1 and c.F == c.I == c.W,
        below=lambda c: True,
        own=True,
        full=lambda p: 2 * p - 1,
    ),
    "dualpipe-v": PipelineFormula(
        "(p-1)(F&B+B-3W)/2",
        lambda c: (c.p - 1) * (c.F + 2 * c.B - 3 * c.W) / 2,
        lambda p, m, v, r: (2 * p + 1) / 2,
        "F = I, W at most F, nothing gained by overlap; a lower bound where F is more than I, and an upper bound where "
        "it is less and W at most I; the peak is that of the last ranks, and a bound for the others",
        exact=lambda c: c.F == c.I and c.W <= c.F,
        below=lambda c: c.F >= c.I,
    ),
    "prefill": _FORWARD_ONLY,
    "decode": _FORWARD_ONLY,
}
"""Schedule -> its formulas."""


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
