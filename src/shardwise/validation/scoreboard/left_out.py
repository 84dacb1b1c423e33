"""Errors of sources that were left out: every source predicted by constants and ranges that were fitted without it.

`left_out.json` is the record of `benchmarks/fit_constants.py --write`: the values fitted on all sources, and for each
source those fitted without it. A source that it does not name was never fitted on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from shardwise.model.parameters import count
from shardwise.predict.time.constants import Constants, uncertainty
from shardwise.predict.time.ranges import Range
from shardwise.validation.scoreboard.mixtures import range_of
from shardwise.validation.scoreboard.rows import PublishedCase, Skipped
from shardwise.validation.scoreboard.score import Adjust, Prediction, Score, predict, scores

RECORD = Path(__file__).parent / "left_out.json"

MISSED = 0.2
"""Share of rows that an 80% range may miss: what its interval score weighs a miss by (Gneiting and Raftery 2007)."""

Fitted = Mapping[str, Mapping[str, float]]
"""Family of devices, or "shared" -> value -> number."""


@dataclass(frozen=True)
class LeftOutScore:
    """Errors of one source, with it among what was fitted on and without it."""

    source: str
    rows: int
    """Rows that were scored; without any, all errors are None."""
    in_sample: float | None
    """Mean absolute error with the stored constants."""
    left_out: float | None
    """Mean absolute error with constants fitted on the other sources."""
    dense: float | None
    """Of rows without experts, left out; None where there are none."""
    large: float | None
    """In-sample, of dense models of 6 billion parameters or more; None where there are none."""
    bias: float | None
    coverage: float | None
    """Share of rows inside their left-out ranges."""
    mean_width: float | None
    interval_score: float | None
    """Mean of width plus 10 times what a measurement lies outside, over the measurement."""
    fitted_on: bool
    """Whether the source was among what the stored constants were fitted on."""
    skipped: dict[str, int]
    """Reason -> rows that are not scored for it."""


@cache
def record() -> dict[str, Any]:
    """The record of the fit."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def with_fitted(values: Fitted) -> Adjust:
    """Constants with fitted values in place of the stored ones: what all families share, then a family's own."""

    def adjust(known: Constants) -> Constants:
        if known.family == "CPU":
            return known
        return known.with_values(**{**values.get("shared", {}), **values.get(known.family, {})})

    return adjust


def left_out(cases: Sequence[PublishedCase]) -> list[tuple[Prediction, Range]]:
    """Every case that can be predicted, by constants and in a range fitted without its source."""
    found: list[tuple[Prediction, Range]] = []
    for source in dict.fromkeys(case.source for case in cases):
        without = record()["left_out"].get(source)
        mine = [case for case in cases if case.source == source]
        predictions, _ = predict(mine, with_fitted(without["values"]) if without else None)
        sigma = without["ranges"] if without else uncertainty()
        found += [(one, range_of(one, sigma)) for one in predictions]
    return found


def left_out_scores(cases: Sequence[PublishedCase], skipped: Sequence[Skipped] = ()) -> list[LeftOutScore]:
    """One score for each source, in the order in which they appear. skipped: rows that are no cases."""
    inside, refused = predict(cases)
    outside = left_out(cases)
    return [
        _score(score, inside, [pair for pair in outside if pair[0].case.source == score.source])
        for score in scores(inside, [*skipped, *refused])
    ]


def _score(score: Score, inside: Sequence[Prediction], outside: Sequence[tuple[Prediction, Range]]) -> LeftOutScore:
    fitted_on = score.source in record()["left_out"]
    if not outside:
        return LeftOutScore(
            score.source, 0, None, None, None, None, None, None, None, None, fitted_on, score.skipped
        )  # fmt: skip
    errors = [one.error for one, _ in outside]
    dense = [abs(one.error) for one, _ in outside if not one.case.model.experts]
    known = [one for one in inside if not one.case.model.experts]
    large = [abs(one.error) for one in known if one.case.source == score.source and count(one.case.model) >= LARGE]
    return LeftOutScore(
        source=score.source,
        rows=score.rows,
        in_sample=score.mean_abs_error,
        left_out=fmean(map(abs, errors)),
        dense=fmean(dense) if dense else None,
        large=fmean(large) if large else None,
        bias=fmean(errors),
        coverage=fmean(bool(a.low <= one.measured <= a.high) for one, a in outside),
        mean_width=fmean(float(a.width) for _, a in outside),
        interval_score=fmean(interval_score(one, a) for one, a in outside),
        fitted_on=fitted_on,
        skipped=score.skipped,
    )


LARGE = 6e9
"""Parameters from which on a model counts as large."""


def interval_score(one: Prediction, around: Range) -> float:
    """Width of a range plus what the measurement lies outside, over the measurement, each in shares of it."""
    low, high = float(around.low) / one.measured, float(around.high) / one.measured
    return high - low + 2 / MISSED * (max(low - 1, 0.0) + max(1 - high, 0.0))


def weighted_coverage(made: Sequence[LeftOutScore]) -> float:
    """Share of rows inside their ranges, the mean over sources."""
    return fmean(score.coverage for score in made if score.coverage is not None)
