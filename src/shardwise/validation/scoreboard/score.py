"""Predictions of published rows against what was measured: by source, never pooled."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.errors import UserError
from shardwise.predict.time.constants import Constants, constants
from shardwise.predict.time.ranges import Range, time_range
from shardwise.predict.time.serving import ServedModel, ServedSeconds
from shardwise.predict.time.step import Pricing, training_step
from shardwise.validation.scoreboard.rows import PublishedCase, Skipped

MISS = 0.25
"""Rows that are off by more than this are listed."""

_ARRAYS = ("micro", "micro_batches", "tp", "pp", "dp", "cp", "ep", "virtual", "shard")

Adjust = Callable[[Constants], Constants]


@dataclass(frozen=True)
class Prediction:
    """Prediction for a row: seconds, and tokens/s where that was measured, turned into seconds a token.

    error: predicted over measured seconds, less one.
    """

    case: PublishedCase
    seconds: float
    measured: float
    range: Range
    parts: dict[str, float]

    @property
    def error(self) -> float:
        return self.seconds / self.measured - 1

    @property
    def inside(self) -> bool:
        return bool(self.range.low <= self.measured <= self.range.high)


@dataclass(frozen=True)
class Score:
    """Errors of one source, as shares of what was measured."""

    source: str
    rows: int
    median_abs_error: float | None
    mean_abs_error: float | None
    p90_abs_error: float | None
    bias: float | None
    coverage: float | None
    mean_width: float | None
    skipped: dict[str, int]


def predict(cases: Sequence[PublishedCase], adjust: Adjust | None = None) -> tuple[list[Prediction], list[Skipped]]:
    """Every case with its prediction; a case that the time model refuses becomes a skipped row with the reason.

    adjust: changes the constants of a device before they are used (what a fit tries).
    """
    prices = _Prices(adjust)
    results: list[Prediction] = []
    refused: list[Skipped] = []
    for group in _groups(cases):
        try:
            results += _trained(group, prices) if group[0].kind == "train" else _served(group, prices)
        except UserError as error:
            refused += [Skipped(case.row, case.source, str(error)) for case in group]
    order = {id(case): place for place, case in enumerate(cases)}
    return sorted(results, key=lambda prediction: order[id(prediction.case)]), refused


class _Prices:
    def __init__(self, adjust: Adjust | None) -> None:
        self._adjust = adjust or (lambda known: known)
        self._made: dict[str, Pricing] = {}

    def of(self, case: PublishedCase) -> Pricing:
        key = repr(case.cluster)
        if key not in self._made:
            self._made[key] = Pricing(case.cluster, self._adjust(constants(case.cluster.device)))
        return self._made[key]


def _groups(cases: Iterable[PublishedCase]) -> list[list[PublishedCase]]:
    """Cases that one call can price as arrays: they differ in degrees and counts only."""
    groups: dict[tuple[Any, ...], list[PublishedCase]] = defaultdict(list)
    for place, case in enumerate(cases):
        split = case.split
        if split is None:
            groups[(place,)].append(case)
            continue
        switches = (split.seq, split.zero, split.sp, split.recompute, split.dtype)
        groups[(case.source, repr(case.model), repr(case.cluster), case.software, len(case.assumed), *switches)].append(
            case
        )
    return list(groups.values())


def _trained(group: list[PublishedCase], prices: _Prices) -> list[Prediction]:
    splits = [case.split for case in group if case.split]
    arrays: dict[str, Any] = {name: np.array([getattr(split, name) for split in splits]) for name in _ARRAYS}
    pricing = prices.of(group[0])
    step = training_step(group[0].model, replace(splits[0], **arrays), group[0].software, pricing)
    shape = (len(group),)
    parts = {name: np.broadcast_to(np.asarray(part, dtype=float), shape) for name, part in step.parts.items()}
    routed = bool(group[0].model.experts)
    around = time_range(parts, pricing.constants, len(group[0].assumed), routed, group[0].software.uncertain)
    low, high = np.atleast_1d(around.low), np.atleast_1d(around.high)
    return [
        Prediction(
            case,
            float(sum(part[i] for part in parts.values())),
            case.measured,
            Range(float(low[i]), float(high[i])),
            {name: float(part[i]) for name, part in parts.items()},
        )
        for i, case in enumerate(group)
    ]


def _served(group: list[PublishedCase], prices: _Prices) -> list[Prediction]:
    case, pricing = group[0], prices.of(group[0])
    served, tokens = _asked(case, pricing)
    parts = {name: float(part) / tokens for name, part in served.parts.items()}
    around = time_range(parts, pricing.constants, len(case.assumed), bool(case.model.experts), served=True)
    exact = Range(float(around.low), float(around.high))
    measured = case.measured if case.kind in REQUEST_TIMES else 1 / case.measured
    return [Prediction(case, float(served.seconds) / tokens, measured, exact, parts)]


REQUEST_TIMES = ("first token", "each token", "answer")
"""Questions about one request of `ServedModel.requested`, in its order; others ask for tokens/s."""


def _asked(case: PublishedCase, pricing: Pricing) -> tuple[ServedSeconds, float]:
    """The seconds that a serving row asks for, and of how many tokens they are where it has tokens/s."""
    assert case.serving
    served = ServedModel(case.model, case.serving, case.software, pricing)
    if case.kind == "decode":
        return served.decode_step(1.0, case.prompt + case.output / 2), 1.0
    if not case.clients:
        requests = -(-case.requests // case.replicas)
        seconds = served.throughput(case.prompt, case.output, requests)
        return seconds, float(requests * case.replicas * case.output)
    found = served.requested(case.prompt, case.output, max(1.0, case.clients / case.replicas))
    if case.kind in REQUEST_TIMES:
        return found[REQUEST_TIMES.index(case.kind)], 1.0
    return found.answer, float(case.clients * case.output)


def scores(predictions: Sequence[Prediction], skipped: Sequence[Skipped]) -> list[Score]:
    """One `Score` for each source, in the order in which they appear."""
    sources = dict.fromkeys([p.case.source for p in predictions] + [s.source for s in skipped])
    return [
        _score(
            source,
            [p for p in predictions if p.case.source == source],
            Counter(s.reason for s in skipped if s.source == source),
        )
        for source in sources
    ]


def _score(source: str, predictions: list[Prediction], skipped: Counter[str]) -> Score:
    if not predictions:
        return Score(source, 0, None, None, None, None, None, None, dict(skipped))
    errors = np.array([p.error for p in predictions])
    off = np.abs(errors)
    return Score(
        source=source,
        rows=len(predictions),
        median_abs_error=float(np.median(off)),
        mean_abs_error=float(off.mean()),
        p90_abs_error=float(np.percentile(off, 90)),
        bias=float(errors.mean()),
        coverage=float(np.mean([p.inside for p in predictions])),
        mean_width=float(np.mean([p.range.width for p in predictions])),
        skipped=dict(skipped),
    )


NETWORK = ("tensor", "data", "pipeline")


def reason(one: Prediction) -> str:
    """The reason found for a row that is far off, in one line, or that none was."""
    share = {name: part / one.seconds for name, part in one.parts.items()}
    traffic = sum(share.get(name, 0.0) for name in NETWORK)
    if 0.1 < share.get("host", 0.0) < 0.5:
        return "host and device take about as long here, and how far each waits for the other is not known"
    unstated = [words for words in one.case.assumed if not words.startswith("ZeRO")]
    if one.case.model.experts and one.case.kind == "train":
        return (
            "experts: capacities and layers beside the blocks (multi-token prediction), kernels of a release and "
            "uneven loads are not modelled"
        )
    if traffic > 0.25:
        direction = "faster" if one.error > 0 else "slower"
        return (
            f"{traffic:.0%} of the prediction is exposed traffic, at the share of the links that this device's runs "
            f"reach on average: this cluster's network was {direction}"
        )
    if unstated:
        return f"the row does not say everything ({'; '.join(unstated)})"
    return "no reason found"
