"""The textbook bubbles and peaks of pipelines, and where they hold.

p ranks, m micro-batches, v chunks a rank; F, I, W are what a rank takes for all its chunks of one micro-batch, and B is
I + W.
Messages take no time. Nothing here knows the schedules: tests hold the two against each other.

Sources: Huang et al. 2019; Narayanan et al. 2019 and 2021; Lamy-Poirier 2022; Qi et al. 2023 and 2024 (their "B" is I);
DeepSeek-AI 2024, whose p counts the stages of a V, two a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from shardwise.records import dataclass


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
    "zb-h1": PipelineFormula(
        "(p-1)(F+I-W)",
        lambda c: (c.p - 1) * (c.F + c.I - c.W),
        lambda p, m, v, r: min(m, p),
        "m of at least p, W at most F and I; else a lower bound",
        exact=lambda c: c.m >= c.p and c.W <= c.F and c.W <= c.I,
        below=lambda c: True,
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
