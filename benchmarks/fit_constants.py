"""Fit the constants of the time model on published steps, family by family, and say how well they do without a source.

    python benchmarks/fit_constants.py TABLE.json... [--write] [--cross] [--seconds N]

One set for each family of devices, never one for a source: the loss is the mean over sources of their mean absolute
error. `--cross` fits again without each source in turn and prints that source's error. `--write` puts values and
the uncertainties of `ranges` into predict/time/devices.json. A quarter of an hour on one core. Models with experts are
scored, never fitted on, but for the uncertainty of their own (`--routed` fits that alone).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

import shardwise.predict.time
from shardwise.predict.time import kernels, network
from shardwise.predict.time.constants import _entry as stored_entry
from shardwise.predict.time.constants import _file as stored_file
from shardwise.predict.time.constants import constants, uncertainty
from shardwise.validation.scoreboard.mixtures import fit_routed, range_of, with_experts
from shardwise.validation.scoreboard.rows import PublishedCase, cases, read
from shardwise.validation.scoreboard.score import Prediction, predict

FILE = Path(shardwise.predict.time.__file__).parent / "devices.json"

TRAINING = {
    "sustained": (0.6, 1.0), "stream": (0.5, 0.92), "triton_attention": (1.0, 5.0), "tensor_hidden": (0.1, 0.9),
    "contention": (0.02, 0.6), "network_share": (0.3, 1.0),
}  # fmt: skip
EAGER = {"launch_s": (5e-6, 9e-5), "step_s": (1e-4, 6e-2), "misaligned": (1.0, 3.0)}
DECODE = {
    "decode_attention": (0.3, 0.95),
    "kernel_gap_s": (5e-7, 8e-6), "gemv_bfloat16": (0.5, 0.95), "gemv_int8": (0.4, 0.95), "gemv_int4": (0.3, 0.95),
    "read_s": (3e-6, 2e-5), "signal_s": (1e-8, 3e-6),
}  # fmt: skip
SERVED = {"kernel_gap_s": (5e-7, 8e-6), "decode_attention": (0.3, 0.95), "iteration_s": (3e-4, 2e-2)}
TOGETHER = ("train", "throughput")
FITTED: dict[str, list[tuple[tuple[str, ...], dict[str, tuple[float, float]]]]] = {
    "Ampere": [(("train",), TRAINING | EAGER), (("decode",), DECODE)],
    # Products in a row run at the measured rate of the device (`sustained_flops`).
    "Hopper": [(TOGETHER, {k: v for k, v in TRAINING.items() if k != "sustained"} | SERVED)],
    "Blackwell": [(TOGETHER, {k: v for k, v in TRAINING.items() if k != "triton_attention"} | SERVED)],
}
"""Family -> groups of values that are fitted together: kinds of rows, value -> bounds. In `devices.json` these values,
and no others, say `SOURCE`."""

SOURCE = "fitted on published steps: benchmarks/fit_constants.py, docs/prediction.md"

PLATEAUS = {"GB300-NVL72": "float8_e4m3fn"}
"""Device -> type whose best throughput nobody measured alone: fitted on the device's own rows after its family."""

NEUTRAL = {
    "sustained": 0.9, "stream": 0.85, "triton_attention": 2.0, "tensor_hidden": 0.5, "contention": 0.2,
    "network_share": 0.7, "launch_s": 4e-5, "step_s": 5e-3, "misaligned": 1.6, "kernel_gap_s": 3.6e-6,
    "gemv_bfloat16": 0.72, "gemv_int8": 0.72, "gemv_int4": 0.72, "read_s": 1e-5, "signal_s": 2e-6,
    "decode_attention": 0.72, "iteration_s": 3e-3,
}  # fmt: skip
"""Where a fit without a source starts, and stays where no other source knows better. From kernels alone where they say:
reading weights at the share of the bandwidth that products of one row reach, latencies of small products and of small
all-reduces; else a guess."""


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


def errors(rows: Sequence[PublishedCase], name: str, values: dict[str, float]) -> dict[str, float]:
    """Source -> mean absolute error with these values of a family."""
    found, _ = predict(rows, lambda known: known.with_values(**values) if known.family == name else known)
    sources: dict[str, list[float]] = {}
    for one in found:
        sources.setdefault(one.case.source, []).append(min(abs(one.error), 1.0))
    return {source: float(np.mean(off)) for source, off in sources.items()}


Bounds = dict[str, tuple[float, float]]


def fit(
    rows: Sequence[PublishedCase], name: str, start: dict[str, float], bounds: Bounds, limit: float
) -> dict[str, float]:
    """Coordinate descent from `start`, then random moves of several values at once, at most `limit` seconds."""

    def loss(values: dict[str, float]) -> float:
        return float(np.mean(list(errors(rows, name, values).values())))

    def clipped(value: str, number: float) -> float:
        return min(bounds[value][1], max(bounds[value][0], number))

    values, step, begun = dict(start), 0.25, time.time()
    best = loss(values)
    while step > 0.02 and time.time() - begun < 0.7 * limit:
        moved = False
        for value in bounds:
            for factor in (1 + step, 1 / (1 + step)):
                tried = values | {value: clipped(value, values[value] * factor)}
                if tried[value] != values[value] and (found := loss(tried)) < best - 1e-5:
                    best, values, moved = found, tried, True
        step = step if moved else step / 2
    random = np.random.default_rng(0)
    for size in np.geomspace(0.08, 0.01, 400):
        if time.time() - begun > limit:
            break
        moves = np.exp(size * random.normal(size=len(bounds)) * (random.random(len(bounds)) < 0.5))
        tried = values | {v: clipped(v, values[v] * move) for v, move in zip(bounds, moves, strict=True)}
        if (found := loss(tried)) < best:
            best, values = found, tried
    return values


def fit_groups(rows: Sequence[PublishedCase], name: str, start: dict[str, float], limit: float) -> dict[str, float]:
    """`fit` for each group of a family's values, on the rows that the group is about."""
    values = dict(start)
    for kinds, bounds in FITTED[name]:
        mine = [row for row in rows if row.kind in kinds]
        if mine:
            values |= fit(mine, name, values, bounds, limit)
    return values


def thinned(rows: Sequence[PublishedCase], most: int = 160) -> list[PublishedCase]:
    """Rows to fit on: dense models, every n-th of a source that has very many."""
    kept: list[PublishedCase] = []
    for source in dict.fromkeys(row.source for row in rows):
        mine = [row for row in rows if row.source == source and not (row.model.experts and row.kind == "train")]
        kept += mine[:: max(1, -(-len(mine) // most))]
    return kept


def print_errors(title: str, found: dict[str, float]) -> None:
    print(f"  {title}: " + ", ".join(f"{source} {100 * off:.1f}%" for source, off in found.items()), flush=True)


RANGES = {
    "common": (0.03, 0.2), "compute": (0.03, 0.3), "host": (0.05, 0.5), "bubble": (0.05, 0.3), "network": (0.05, 0.5),
    "experts": (0.1, 2.0), "borrowed": (0.03, 0.2), "assumed": (0.02, 0.1),
}  # fmt: skip
"""Uncertainty -> bounds: none is believed to be smaller than its lower one."""


def fit_ranges(found: Sequence[Prediction]) -> dict[str, float]:
    """Uncertainties that hold 82% of the rows of each source on average, as even and as narrow as one set can."""

    def held(sigma: dict[str, float]) -> tuple[dict[str, float], float]:
        """Source -> share of rows inside, and the mean width over sources."""
        inside: dict[str, list[bool]] = {}
        widths: dict[str, list[float]] = {}
        for one in found:
            around = range_of(one, sigma)
            inside.setdefault(one.case.source, []).append(bool(around.low <= one.measured <= around.high))
            widths.setdefault(one.case.source, []).append(around.width)
        shares = {source: float(np.mean(rows)) for source, rows in inside.items()}
        return shares, float(np.mean([np.mean(rows) for rows in widths.values()]))

    def loss(sigma: dict[str, float]) -> float:
        shares, width = held(sigma)
        off = np.array(list(shares.values())) - 0.82
        return float(20 * off.mean() ** 2 + (off**2).mean() + 0.3 * width)

    sigma = {name: min(high, max(low, uncertainty()[name])) for name, (low, high) in RANGES.items()}
    sigma["routed"] = uncertainty()["routed"]
    best, step = loss(sigma), 0.5
    while step > 0.04:
        moved = False
        for name, (low, high) in RANGES.items():
            for factor in (1 + step, 1 / (1 + step)):
                tried = sigma | {name: min(high, max(low, sigma[name] * factor))}
                if (value := loss(tried)) < best - 1e-6:
                    best, sigma, moved = value, tried, True
        step = step if moved else step / 2
    sigma["routed"] = fit_routed(with_experts(found), sigma)
    shares, width = held(sigma)
    print("coverage", {source: round(share, 2) for source, share in shares.items()}, f"width {width:.2f}", flush=True)
    return sigma


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cross", action="store_true")
    parser.add_argument("--seconds", type=float, default=300, help="for each fit")
    parser.add_argument("--ranges", action="store_true", help="fit the ranges only")
    parser.add_argument("--routed", action="store_true", help="fit the uncertainty of models with experts only")
    parser.add_argument("--family", action="append", choices=list(FITTED))
    args = parser.parse_args()
    remember()
    rows = [case for table in args.tables for case in cases(read(table))[0]]
    told = json.loads(FILE.read_text(encoding="utf-8"))
    for name in [] if args.ranges or args.routed else args.family or FITTED:
        fit_family(name, [row for row in rows if family(row.cluster.device) == name], told, args)
    if args.routed:
        fitted = {"routed": fit_routed(with_experts(predict(rows)[0]), uncertainty())}
        print(f"uncertainty of models with experts: {fitted['routed']:.2f}")
    elif args.write:
        save(told)
        fitted = fit_ranges(predict(rows)[0])
    if args.write:
        told["ranges"]["values"] |= {name: round(value, 4) for name, value in fitted.items()}
        save(told)


def fit_family(name: str, rows: list[PublishedCase], told: dict, args: argparse.Namespace) -> None:
    stored = told["families"][name]["values"]
    names = [value for _, bounds in FITTED[name] for value in bounds]
    few = thinned(rows)
    values = fit_groups(few, name, {value: stored[value]["value"] for value in names}, args.seconds)
    print(name, {value: float(f"{number:.4g}") for value, number in values.items()}, flush=True)
    print_errors("fitted", errors(few, name, values))
    if args.cross:
        for source in dict.fromkeys(row.source for row in few):
            others = [row for row in few if row.source != source]
            if others:
                without = fit_groups(others, name, {value: NEUTRAL[value] for value in names}, args.seconds / 2)
                print_errors("without it", errors([row for row in few if row.source == source], name, without))
    for value, number in values.items():
        stored[value]["value"] = float(f"{number:.4g}")
    for device, dtype in PLATEAUS.items():
        mine = [row for row in few if row.cluster.device.name == device]
        if mine:
            told["devices"][device]["plateaus"][dtype] = fit_plateau(mine, name, values, dtype)


def fit_plateau(rows: list[PublishedCase], name: str, values: dict[str, float], dtype: str) -> dict:
    """The plateau of one type with the least mean error on a device's rows."""

    def error(plateau: float) -> float:
        def adjust(known):
            return replace(known.with_values(**values), plateaus={**known.plateaus, dtype: plateau})

        return float(np.mean([abs(one.error) for one in predict(rows, adjust)[0]]))

    kernels.Kernels._isolated = _alone
    best = min(np.arange(0.8, 1.21, 0.02), key=lambda plateau: error(float(plateau)))
    remember()
    print(f"  plateau of {dtype} on {rows[0].cluster.device.name}: {best:.2f}")
    return {
        "value": round(float(best), 2),
        "source": "fitted on published steps of this device: no product measured alone",
    }


def save(told: dict) -> None:
    FILE.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    stored_file.cache_clear()
    stored_entry.cache_clear()
    family.cache_clear()


if __name__ == "__main__":
    main()
