"""Models with experts on the scoreboard: one model at a time, with ranges that were fitted without it.

No constant of the time model is fitted on these rows: their kernels, collectives and counts of launches come from
elsewhere, so their errors are the same with a model left out. What is fitted on them is how far the predictions of such
models can be trusted, the uncertainty "routed".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from shardwise.predict.time.constants import constants, uncertainty
from shardwise.predict.time.ranges import Range, time_range
from shardwise.validation.scoreboard.score import Prediction

HELD = 0.8
"""Share of rows that a range is meant to hold."""


@dataclass(frozen=True)
class MixtureScore:
    """Errors of one model's rows, as shares of what was measured."""

    model: str
    rows: int
    mean_abs_error: float
    bias: float
    coverage: float
    """Share of the rows inside their ranges, whose uncertainty was fitted on the other models' rows."""
    mean_width: float
    """Of these ranges."""
    routed: float
    """That uncertainty."""


def with_experts(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Training rows of models with experts."""
    return [one for one in predictions if one.case.kind == "train" and one.case.model.experts]


def range_of(one: Prediction, sigma: Mapping[str, float]) -> Range:
    """The range of a row with other uncertainties."""
    known, routed = constants(one.case.cluster.device), bool(one.case.model.experts)
    unknown = one.case.software.uncertain
    return time_range(one.parts, known, len(one.case.assumed), routed, unknown, sigma)


def coverage(predictions: Sequence[Prediction], sigma: Mapping[str, float]) -> float:
    """Share of rows inside their ranges."""
    around = [(one, range_of(one, sigma)) for one in predictions]
    return fmean(bool(a.low <= one.measured <= a.high) for one, a in around)


def fit_routed(predictions: Sequence[Prediction], sigma: Mapping[str, float]) -> float:
    """The least uncertainty of models with experts, in hundredths, with which their ranges hold `HELD` of the rows."""
    for percent in range(1, 100):
        if coverage(predictions, {**sigma, "routed": percent / 100}) >= HELD:
            return percent / 100
    return 1.0


def mixture_scores(predictions: Sequence[Prediction]) -> list[MixtureScore]:
    """One score for each model with experts, in the order in which they appear, and one named "all"."""
    rows = with_experts(predictions)
    scores: list[MixtureScore] = []
    for model in dict.fromkeys(map(_name, rows)):
        own = [one for one in rows if _name(one) == model]
        others = [one for one in rows if _name(one) != model]
        scores.append(_score(model, own, fit_routed(others, uncertainty()) if others else uncertainty()["routed"]))
    return [*scores, _together(scores)] if scores else []


def _name(one: Prediction) -> str:
    """The model's name without what a table says of the run behind it."""
    return one.case.model.name.split(" (")[0]


def _score(model: str, rows: Sequence[Prediction], routed: float) -> MixtureScore:
    sigma = {**uncertainty(), "routed": routed}
    return MixtureScore(
        model,
        len(rows),
        fmean(abs(one.error) for one in rows),
        fmean(one.error for one in rows),
        coverage(rows, sigma),
        fmean(float(range_of(one, sigma).width) for one in rows),
        routed,
    )


def _together(scores: Sequence[MixtureScore]) -> MixtureScore:
    """All rows, each as it was scored; the uncertainty of the mean."""
    count = sum(score.rows for score in scores)

    def mean(name: str) -> float:
        return sum(score.rows * getattr(score, name) for score in scores) / count

    return MixtureScore(
        "all", count, *(mean(name) for name in ("mean_abs_error", "bias", "coverage", "mean_width", "routed"))
    )
