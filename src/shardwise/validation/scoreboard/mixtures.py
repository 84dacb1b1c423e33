"""Models with experts on the scoreboard: one model at a time, with ranges that were fitted without it.

No constant of the time model is fitted on these rows: their kernels, collectives and counts of launches come from
elsewhere, so their errors are the same with a model left out. What is fitted on them is how far the predictions of such
models can be trusted, the uncertainty "routed".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    return [one for one in predictions if one.case.kind == "train" and one.case.model.experts]


def range_of(one: Prediction, sigma: Mapping[str, float]) -> Range:
    """The range of a row with other uncertainties."""
    known, routed = constants(one.case.cluster.device), bool(one.case.model.experts)
    unknown, served = one.case.software.uncertain, one.case.kind != "train"
    return time_range(one.parts, known, len(one.case.assumed), routed, unknown, sigma, served)


def coverage(predictions: Sequence[Prediction], sigma: Mapping[str, float]) -> float:
    """Share of rows inside their ranges."""
    around = [(one, range_of(one, sigma)) for one in predictions]
    return fmean(bool(a.low <= one.measured <= a.high) for one, a in around)


def fit_routed(predictions: Sequence[Prediction], sigma: Mapping[str, float]) -> float:
    """The least uncertainty of models with experts, in hundredths, with which their ranges hold `HELD` of the rows."""
    return _least(partial(_holds, predictions, sigma, "routed", HELD))


def fit_served(predictions: Sequence[Prediction], sigma: Mapping[str, float], held: float) -> dict[str, float]:
    """The least uncertainties of serving, in hundredths, with which ranges hold `held` of all rows: "served" for dense
    models, with too few sources for a mean over these, and with it "served_routed" for the others."""
    rows = [one for one in predictions if one.case.kind != "train"]
    found: dict[str, float] = {}
    for name, routed in (("served", False), ("served_routed", True)):
        own = [one for one in rows if bool(one.case.model.experts) == routed]
        found[name] = _least(partial(_holds, own, {**sigma, **found}, name, held)) if own else sigma[name]
    return found


def _holds(predictions: Sequence[Prediction], sigma: Mapping[str, float], name: str, held: float, tried: float) -> bool:
    return coverage(predictions, {**sigma, name: tried}) >= held


def _least(enough: Callable[[float], bool]) -> float:
    return next((percent / 100 for percent in range(1, 100) if enough(percent / 100)), 1.0)


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
