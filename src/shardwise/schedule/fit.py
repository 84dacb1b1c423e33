"""The α, β and γ of links, found from measured times of schedules, and how well they then predict others.

A price is a sum of figures (see `price.py`), each as often as the schedule and the size say. So the figures are the
solution of linear equations, one a measurement, in which relative errors count, and large ones no more than their size:
a measurement that something disturbed must not move the others. Speeds are found for several sizes of a rank's memory,
with straight lines over the logarithm of the size between them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Link, Speed
from shardwise.errors import UserError
from shardwise.schedule.comm import CommSchedule
from shardwise.schedule.network import Network, Tier
from shardwise.schedule.price import price, profile

SPEEDS_FROM = 64 << 10
"""Bytes of a rank's memory below which speeds are not told apart: there latency is nearly all of the time."""
RESAMPLED = 200
INTERVAL = 80
"""Per cent of the resampled fits that lie within an interval."""

_CONSTANT = ("startup", "intra.alpha", "inter.alpha", "local.alpha")
_SIZED = ("intra.beta", "inter.beta", "gamma", "local.beta", "saved")
_Floats = NDArray[np.float64]


class Sample(NamedTuple):
    """A measurement: what ran, on a full tensor of `nbytes` bytes, and how long it took."""

    schedule: CommSchedule
    nbytes: float
    seconds: float


class Figure(NamedTuple):
    """Seconds, or seconds a byte, with the interval in which `INTERVAL` per cent of resampled fits lie."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class NetworkFit:
    """Figures of `Network` by name: startup, intra.alpha, inter.alpha, local.alpha; and for each of `sizes`, bytes of a
    rank's memory, intra.beta, inter.beta, gamma, local.beta, and again, which is intra.beta less `saved`. What is in no
    measurement is not there."""

    sizes: tuple[float, ...]
    constant: Mapping[str, Figure]
    sized: Mapping[str, tuple[Figure, ...]]
    reads: bool

    def link(self, tier: str, source: str) -> Link:
        """The link "intra" or "inter" with four digits of each figure. Raises `UserError` where the measurements do not
        tell its bandwidth."""
        nothing = (Figure(0.0, 0.0, 0.0),) * len(self.sizes)
        columns = [self.sized.get(name, nothing) for name in (f"{tier}.beta", "gamma", "local.beta")]
        columns.append(self.sized.get("again", nothing) if tier == "intra" else nothing)
        speeds = tuple(
            Speed(nbytes, *(_digits(1 / column[k].value) if column[k].value else None for column in columns))
            for k, nbytes in enumerate(self.sizes)
        )
        if speeds[-1].bandwidth is None:
            raise UserError("these measurements tell no bandwidth: measure larger sizes, or when the host is less busy")
        alpha, startup, copy_alpha = (
            _digits(self.constant[name].value) if name in self.constant else 0.0
            for name in (f"{tier}.alpha", "startup", "local.alpha")
        )
        return Link(alpha, speeds[-1].bandwidth, source, startup, copy_alpha, self.reads, speeds)


def fit(samples: Sequence[Sample], node: Sequence[int] | None = None, reads: bool = False) -> NetworkFit:
    """Fit the links of a group of ranks.

    samples: of calls that follow each other on the same memory. node: of each rank, as in `Network`, with a NIC for
    each rank; left out, all on one. reads: ranks read each other's memory. Raises `UserError` without samples, and for
    times that are not positive.
    """
    if not samples or min(sample.seconds for sample in samples) <= 0:
        raise UserError("a fit needs measured times, all of them positive")
    ranks = samples[0].schedule.ranks
    where = np.zeros(ranks, dtype=np.int64) if node is None else np.asarray(node)
    sizes = sorted({s.nbytes for s in samples if s.nbytes >= SPEEDS_FROM}) or [max(s.nbytes for s in samples)]
    clipped, at = (
        np.log(np.clip([s.nbytes * len(s.schedule.regions) for s in samples], sizes[0], sizes[-1])),
        np.log(sizes),
    )
    hats = np.array([np.interp(clipped, at, row) for row in np.eye(len(sizes))]).T
    measured = np.array([sample.seconds for sample in samples])
    tier, nics = Tier(2e-6, 1e-10), int(np.bincount(where).max())
    network = Network(
        where, tier, tier, 1e-10, nics, startup=1e-6, local=tier, reads=reads, repeated=reads, saved=5e-11
    )
    # Which port is the busiest depends on the figures: it is looked up again with those found.
    for _ in range(4):
        counts = _counts(samples, network)
        sized = (counts[:, len(_CONSTANT) :, None] * hats[:, None, :]).reshape(len(samples), -1)
        equations = np.hstack([counts[:, : len(_CONSTANT)], sized]) / measured[:, None]
        found = _solve(equations)
        network = _typical(network, found, len(sizes))
    return _with_intervals(equations, found, tuple(sizes), reads)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _changed(network: Network, name: str, factor: float) -> Network:
    whole, _, part = name.partition(".")
    old = getattr(network, whole)
    new = old._replace(**{part: getattr(old, part) * factor}) if part else old * factor
    return replace(network, **{whole: new})


def _counts(samples: Sequence[Sample], network: Network) -> _Floats:
    """Count of each constant in each sample's price, shape (samples, figures): seconds for α, bytes for β and γ.

    A price is linear in the figures around those of the network, so it is the slope.
    """
    names = (*_CONSTANT, *_SIZED)
    step = 1e-4
    profiles = {}
    for schedule in dict.fromkeys(sample.schedule for sample in samples):
        changed = [_changed(network, name, 1 + step) for name in names]
        profiles[schedule] = [profile(schedule, each) for each in (network, *changed)]
    old = attrgetter(*names)(network)
    counts = np.zeros((len(samples), len(names)))
    for i, sample in enumerate(samples):
        base, *others = (found.at(sample.nbytes).seconds for found in profiles[sample.schedule])
        counts[i] = [(other - base) / (step * value) for other, value in zip(others, old, strict=True)]
    return np.where(np.abs(counts) * old < 1e-9 * np.abs(counts * old).max(axis=1, keepdims=True), 0.0, counts)


def _typical(network: Network, found: _Floats, sizes: int) -> Network:
    """The network with one figure in place of each size's; what was found to take no time keeps a little of it."""
    constant, sized = found[: len(_CONSTANT)], found[len(_CONSTANT) :].reshape(-1, sizes).mean(axis=1)
    for name, value in zip((*_CONSTANT, *_SIZED), [*constant, *sized], strict=True):
        old = attrgetter(name)(network)
        network = _changed(network, name, max(value, old * 1e-3) / old)
    return replace(network, saved=min(network.saved, 0.9 * network.intra.beta))


def _solve(equations: _Floats, weights: _Floats | None = None, rounds: int = 40) -> _Floats:
    """x, none of it negative, for which `equations @ x` is nearest to one everywhere, in the sum of absolute errors."""
    scale = np.abs(equations).max(axis=0)
    used = scale > 0
    a = equations[:, used] / scale[used]
    weights = np.ones(len(a)) if weights is None else weights
    for _ in range(rounds):
        root = np.sqrt(weights)
        x = _not_negative(a * root[:, None], root)
        # Below a hundredth the error counts by its square, or single measurements would be met exactly.
        weights = 1 / np.maximum(np.abs(a @ x - 1), 0.01)
    result = np.zeros(equations.shape[1])
    result[used] = x / scale[used]
    return result


def _not_negative(a: _Floats, b: _Floats) -> _Floats:
    """Least squares without the unknowns that would be negative, the most negative left out first."""
    gram, right = a.T @ a, a.T @ b
    # Figures that the measurements do not tell apart share what they tell, where rounding alone would have decided.
    gram += np.eye(len(gram)) * np.trace(gram) * 1e-9
    kept = np.arange(len(gram))
    while len(kept):
        x = np.linalg.solve(gram[np.ix_(kept, kept)], right[kept])
        if x.min() >= 0:
            break
        kept = np.delete(kept, x.argmin())
    result = np.zeros(len(gram))
    result[kept] = x
    return result


def _with_intervals(equations: _Floats, found: _Floats, sizes: tuple[float, ...], reads: bool) -> NetworkFit:
    draw = np.random.default_rng(0)
    weights = 1 / np.maximum(np.abs(equations @ found - 1), 0.01)
    fits = []
    for _ in range(RESAMPLED):
        some = draw.integers(len(equations), size=len(equations))
        fits.append(_solve(equations[some], weights[some], rounds=5))
    told = np.abs(equations).max(axis=0) > 0
    found, *fits = (_with_again(each, len(sizes)) for each in (found, *fits))
    outside = (100 - INTERVAL) / 2
    low, high = np.percentile(fits, [outside, 100 - outside], axis=0)
    ends = np.stack([found, np.minimum(low, found), np.maximum(high, found)], axis=1)
    figures = [Figure(*row) for row in ends.tolist()]
    constant = {name: figures[i] for i, name in enumerate(_CONSTANT) if told[i]}
    sized = {}
    for i, name in enumerate(_SIZED):
        part = slice(len(_CONSTANT) + i * len(sizes), len(_CONSTANT) + (i + 1) * len(sizes))
        if told[part].any():
            sized["again" if name == "saved" else name] = tuple(figures[part])
    return NetworkFit(sizes, constant, sized, reads)


def _with_again(found: _Floats, sizes: int) -> _Floats:
    """The figures with what a byte takes again in place of what it saves; a little of the first time is left."""
    rows = found[len(_CONSTANT) :].reshape(-1, sizes).copy()
    beta, saved = rows[_SIZED.index("intra.beta")], rows[_SIZED.index("saved")]
    rows[_SIZED.index("saved")] = np.maximum(beta - saved, 0.02 * beta)
    return np.concatenate([found[: len(_CONSTANT)], rows.ravel()])


class AlgorithmChoice(NamedTuple):
    """A collective at a size: the algorithm predicted to be the cheapest, the one measured to be, and how much longer
    the first was measured to take (0 when they are one)."""

    collective: str
    nbytes: float
    predicted: str
    measured: str
    behind: float


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a network's predictions. errors: by collective, each |predicted / measured - 1|. cells: where
    there are two algorithms or more."""

    errors: Mapping[str, Sequence[float]]
    cells: Sequence[AlgorithmChoice]

    @property
    def median_error(self) -> float | None:
        """Over all of them; None where there are none."""
        every = [error for errors in self.errors.values() for error in errors]
        return median(every) if every else None

    def chosen_well(self, within: float = 0.1) -> float | None:
        """The share of cells whose predicted cheapest is the measured one, or at most `within` slower; None where there
        are no cells."""
        return sum(cell.behind <= within for cell in self.cells) / len(self.cells) if self.cells else None


def accuracy(samples: Sequence[Sample], network: Network) -> Accuracy:
    """Hold a network's prices against measurements; errors of sizes up to `SPEEDS_FROM` are not counted."""
    errors: defaultdict[str, list[float]] = defaultdict(list)
    cells: defaultdict[tuple[str, float], list[tuple[float, Sample]]] = defaultdict(list)
    for sample in samples:
        predicted = price(sample.schedule, network, sample.nbytes).seconds
        cells[sample.schedule.collective, sample.nbytes].append((predicted, sample))
        if sample.nbytes > SPEEDS_FROM:
            errors[sample.schedule.collective].append(abs(predicted / sample.seconds - 1))
    found = []
    for (collective, nbytes), priced in cells.items():
        if len(priced) > 1:
            chosen = min(priced, key=lambda pair: pair[0])[1]
            best = min((sample for _, sample in priced), key=lambda sample: sample.seconds)
            names = chosen.schedule.algorithm, best.schedule.algorithm
            found.append(AlgorithmChoice(collective, nbytes, *names, chosen.seconds / best.seconds - 1))
    return Accuracy(errors, found)
