"""Fit the constants of the time model on published steps, and again without each source in turn.

    python benchmarks/fit_constants.py TABLE.json... [--write] [--ranges] [--alone]

The loss is the mean over sources of their mean absolute error. Few values are fitted, each of which two sources or more
tell (`--alone` prints what each source says of each value); all others are measured on kernels, read, or assumed.
`--write` puts the values and the uncertainties of ranges into predict/time/devices.json, and those fitted without each
source into validation/scoreboard/left_out.json, which `validate --left-out` reads. Ranges are fitted on predictions
whose own source was left out. Models with experts are scored, never fitted on, but for the uncertainty of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import numpy as np

import shardwise.predict.time
from shardwise.predict.time import kernels, network
from shardwise.predict.time.constants import _entry as stored_entry
from shardwise.predict.time.constants import _file as stored_file
from shardwise.predict.time.constants import constants, uncertainty
from shardwise.validation.scoreboard.left_out import RECORD, with_fitted
from shardwise.validation.scoreboard.mixtures import fit_routed, fit_served, range_of, with_experts
from shardwise.validation.scoreboard.rows import PublishedCase, cases, read
from shardwise.validation.scoreboard.score import Prediction, predict

FILE = Path(shardwise.predict.time.__file__).parent / "devices.json"

SOURCE = "fitted on published steps: benchmarks/fit_constants.py, docs/prediction.md"

Values = dict[str, dict[str, float]]
"""Family, or "shared" -> value -> number."""

FITTED: dict[str, dict[str, tuple[float, float, float]]] = {
    "shared": {
        "contention": (0.2, 0.02, 1.0), "tensor_hidden": (0.7, 0.1, 0.98),
    },
    "Ampere": {"sustained": (0.9, 0.6, 1.0)},
    "Blackwell": {"sustained": (0.9, 0.5, 1.0)},
}  # fmt: skip
"""Family, or "shared" -> value -> (where a fit starts, bounds). In `devices.json` these values, and no others, say
`SOURCE`. Starts are guesses."""

GRID = (0.5, 0.75, 1.0, 1.33, 2.0)
"""Factors of a value at which rows are predicted; between them their logarithms are interpolated."""

TELLS = 0.002
"""A source tells a value whose change by a fifth changes its predictions by so much on average."""

_alone = kernels.Kernels._isolated


def _key(number) -> tuple:
    array = np.asarray(number, dtype=float)
    return array.shape, array.tobytes()


def remember() -> None:
    """Keep what does not depend on a fitted value between evaluations."""
    alone, sampled = _alone, network.Collectives._sampled
    products: dict = {}
    curves: dict = {}

    def isolated(self, *shape):
        key = (self.constants.name, *(x if isinstance(x, str) else _key(x) for x in shape))
        if key not in products:
            products[key] = alone(self, *shape)
        return products[key]

    def curve(self, op, ranks, stride, schedule):
        key = (repr(self._cluster), op, ranks, stride, schedule, self.base)
        if key not in curves:
            curves[key] = sampled(self, op, ranks, stride, schedule)
        return curves[key]

    kernels.Kernels._isolated, network.Collectives._sampled = isolated, curve


@cache
def family(device) -> str:
    return constants(device).family


def starts() -> Values:
    return {name: {value: start for value, (start, _, _) in bounds.items()} for name, bounds in FITTED.items()}


def errors(rows: Sequence[PublishedCase], values: Values) -> dict[str, float]:
    """Source -> mean absolute error with these values."""
    found, _ = predict(rows, with_fitted(values))
    sources: dict[str, list[float]] = {}
    for one in found:
        sources.setdefault(one.case.source, []).append(min(abs(one.error), 1.0))
    return {source: float(np.mean(off)) for source, off in sources.items()}


class Surface:
    """Predictions of rows around a centre: what each value alone changes, added up in the logarithms.

    One evaluation of all rows takes a second and more, so fits without each source share these. Reported errors are
    evaluated exactly.
    """

    def __init__(self, rows: Sequence[PublishedCase], centre: Values) -> None:
        found = predict(rows, with_fitted(centre))[0]
        self.rows = [one.case for one in found]
        self.measured = np.array([one.measured for one in found])
        self.centre, self.base = centre, np.log([one.seconds for one in found])
        self.moves: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = {}
        for name, bounds in FITTED.items():
            for value in bounds:
                self.moves[name, value] = self._moved(name, value)

    def _moved(self, name: str, value: str) -> tuple[np.ndarray, np.ndarray]:
        """The value's numbers, and the change of each row's logarithm at each of them."""
        _, least, most = FITTED[name][value]
        numbers = np.unique(np.clip(self.centre[name][value] * np.array(GRID), least, most))
        changes = []
        for number in numbers:
            moved = {**self.centre, name: {**self.centre[name], value: float(number)}}
            changes.append(np.log([one.seconds for one in predict(self.rows, with_fitted(moved))[0]]) - self.base)
        return np.log(numbers), np.array(changes)

    def fit(self, sources: Sequence[str]) -> Values:
        """Values with the least mean over these sources of their mean absolute error: coordinate descent."""
        of_source = [np.array([row.source == source for row in self.rows]) for source in sources]
        at = {key: float(np.log(self.centre[key[0]][key[1]])) for key in self.moves}

        def change(key: tuple[str, str], number: float) -> np.ndarray:
            numbers, changes = self.moves[key]
            place = int(np.clip(np.searchsorted(numbers, number) - 1, 0, len(numbers) - 2))
            share = (number - numbers[place]) / (numbers[place + 1] - numbers[place])
            return (1 - share) * changes[place] + share * changes[place + 1]

        def loss(predicted: np.ndarray) -> float:
            off = np.minimum(np.abs(np.exp(predicted) / self.measured - 1), 1.0)
            return float(np.mean([off[mask].mean() for mask in of_source]))

        parts = {key: change(key, number) for key, number in at.items()}
        total = self.base + sum(parts.values())
        best, step = loss(total), 0.3
        while step > 0.003:
            moved = False
            for key, (numbers, _) in self.moves.items():
                for sign in (1, -1):
                    number = float(np.clip(at[key] + sign * step, numbers[0], numbers[-1]))
                    part = change(key, number)
                    tried = total - parts[key] + part
                    if (value := loss(tried)) < best - 1e-6:
                        best, total, moved = value, tried, True
                        at[key], parts[key] = number, part
            step = step if moved else step / 2
        values: Values = {name: {} for name in FITTED}
        for (name, value), number in at.items():
            values[name][value] = float(f"{np.exp(number):.4g}")
        return values


def is_known(row: PublishedCase) -> bool:
    """Whether a row is evidence: not where a power limit is unknown."""
    return not any("power limit" in words for words in row.assumed)


def thinned(rows: Sequence[PublishedCase], most: int = 60) -> list[PublishedCase]:
    """Rows to fit on: dense models, every n-th of a source that has very many."""
    kept: list[PublishedCase] = []
    for source in dict.fromkeys(row.source for row in rows):
        mine = [row for row in rows if row.source == source and not row.model.experts]
        kept += mine[:: max(1, -(-len(mine) // most))]
    return kept


def told_by(rows: Sequence[PublishedCase], values: Values) -> dict[str, list[str]]:
    """Fitted value -> the sources that tell it."""
    before = {id(one.case): one.seconds for one in predict(rows, with_fitted(values))[0]}
    told: dict[str, list[str]] = {}
    for name, bounds in FITTED.items():
        for value in bounds:
            moved = {**values, name: {**values[name], value: values[name][value] * 1.2}}
            shifts: dict[str, list[float]] = {}
            for one in predict(rows, with_fitted(moved))[0]:
                shifts.setdefault(one.case.source, []).append(abs(one.seconds / before[id(one.case)] - 1))
            told[f"{name}.{value}"] = [source for source, shift in shifts.items() if np.mean(shift) > TELLS]
    return told


RANGES = {
    "common": (0.03, 0.4), "compute": (0.03, 0.4), "host": (0.05, 0.5), "bubble": (0.05, 0.3), "network": (0.05, 0.5),
    "experts": (0.1, 2.0), "borrowed": (0.03, 0.3), "assumed": (0.02, 0.15),
}  # fmt: skip
"""Uncertainty -> bounds: none is believed to be smaller than its lower one."""

HELD = 0.87
"""Share of a source's rows that ranges are fitted to hold: a source that is not among them has some less."""


def fit_ranges(found: Sequence[Prediction]) -> dict[str, float]:
    """Uncertainties that hold `HELD` of the rows of each source on average, as even and as narrow as one set can."""

    def held(sigma: Mapping[str, float]) -> tuple[dict[str, float], float]:
        """Source -> share of rows inside, and the mean width over sources."""
        inside: dict[str, list[bool]] = {}
        widths: dict[str, list[float]] = {}
        for one in found:
            around = range_of(one, sigma)
            inside.setdefault(one.case.source, []).append(bool(around.low <= one.measured <= around.high))
            widths.setdefault(one.case.source, []).append(float(around.width))
        shares = {source: float(np.mean(rows)) for source, rows in inside.items()}
        return shares, float(np.mean([np.mean(rows) for rows in widths.values()]))

    def loss(sigma: Mapping[str, float]) -> float:
        shares, width = held(sigma)
        off = np.array(list(shares.values())) - HELD
        return float(20 * off.mean() ** 2 + (np.minimum(off, 0.0) ** 2).mean() * 4 + 0.15 * width)

    sigma = {name: min(high, max(low, uncertainty()[name])) for name, (low, high) in RANGES.items()}
    sigma |= {name: uncertainty()[name] for name in ("routed", "software", "served", "served_routed")}
    best, step = loss(sigma), 0.5
    while step > 0.04:
        moved = False
        for name, (low, high) in RANGES.items():
            for factor in (1 + step, 1 / (1 + step)):
                tried = sigma | {name: min(high, max(low, sigma[name] * factor))}
                if (value := loss(tried)) < best - 1e-6:
                    best, sigma, moved = value, tried, True
        step = step if moved else step / 2
    if experts := with_experts(found):
        sigma["routed"] = fit_routed(experts, sigma)
    sigma |= fit_served(found, sigma, HELD)
    shares, width = held(sigma)
    print("coverage", {source: round(share, 2) for source, share in shares.items()}, f"width {width:.2f}", flush=True)
    return {name: round(value, 4) for name, value in sigma.items()}


def fit_software(rows: Sequence[PublishedCase], sigma: Mapping[str, float], values: Values) -> float:
    """The least uncertainty of unknown software with which ranges hold `HELD` of each training source on average, where
    the source's software is taken as unknown."""
    from dataclasses import replace

    taken = [replace(row, engine="unknown", recipe={}) for row in rows if row.kind == "train" and not row.model.experts]
    found = predict(taken, with_fitted(values))[0]
    for percent in range(1, 100):
        inside: dict[str, list[bool]] = {}
        for one in found:
            around = range_of(one, {**sigma, "software": percent / 100})
            inside.setdefault(one.case.source, []).append(bool(around.low <= one.measured <= around.high))
        if np.mean([np.mean(rows) for rows in inside.values()]) >= HELD:
            return percent / 100
    return 1.0


def fit_all(rows: Sequence[PublishedCase], sources: Sequence[str]) -> tuple[Values, dict[str, Values]]:
    """Values fitted on all sources, and without each."""
    values = starts()
    for _ in range(2):
        around = Surface(rows, values)
        values = around.fit(sources)
        print("fitted", values, flush=True)
    around = Surface(rows, values)
    return around.fit(sources), {
        source: around.fit([other for other in sources if other != source]) for source in sources
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--ranges", action="store_true", help="fit the ranges only, with the recorded values")
    parser.add_argument("--alone", action="store_true", help="print the sources that tell each value, and fit nothing")
    args = parser.parse_args()
    remember()
    rows = [case for table in args.tables for case in cases(read(table))[0] if is_known(case)]
    few = thinned(rows)
    if args.alone:
        for value, sources in told_by(few, starts()).items():
            print(value, ", ".join(sources))
        return
    sources = list(dict.fromkeys(row.source for row in rows))
    if args.ranges:
        told = json.loads(RECORD.read_text(encoding="utf-8"))
        values, apart = told["values"], {name: told["left_out"][name]["values"] for name in sources}
    else:
        values, apart = fit_all(few, sources)
        print("fitted", values, {name: f"{100 * off:.1f}%" for name, off in errors(rows, values).items()}, flush=True)
        for source in sources:
            mine = [row for row in rows if row.source == source]
            print(f"without {source}: {100 * errors(mine, apart[source])[source]:.1f}% {apart[source]}", flush=True)
    outside = {
        source: predict([row for row in rows if row.source == source], with_fitted(apart[source]))[0]
        for source in sources
    }
    ranges = fit_ranges([one for found in outside.values() for one in found])
    ranges["software"] = fit_software(rows, ranges, values)
    left = {
        source: {
            "values": apart[source],
            "ranges": fit_ranges([one for other in sources if other != source for one in outside[other]]),
        }
        for source in sources
    }
    if args.write:
        save(values, ranges, left, args.tables, told_by(few, values))


def save(values: Values, ranges: dict[str, float], left: dict, tables: Sequence[Path], told: dict) -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    for name, table in values.items():
        place = stored["shared"] if name == "shared" else stored["families"][name]
        for value, number in table.items():
            place["values"][value] = {"value": number, "source": SOURCE}
    stored["ranges"]["values"] = ranges
    FILE.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    record = {
        "command": "python benchmarks/fit_constants.py " + " ".join(table.name for table in tables) + " --write",
        "date": datetime.now(UTC).date().isoformat(),
        "tables": {table.name: hashlib.sha256(table.read_bytes()).hexdigest() for table in tables},
        "told_by": told,
        "values": values,
        "ranges": ranges,
        "left_out": left,
    }
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    stored_file.cache_clear()
    stored_entry.cache_clear()
    family.cache_clear()


if __name__ == "__main__":
    main()
