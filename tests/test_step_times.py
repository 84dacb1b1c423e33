"""`benchmarks/step_times.py`: its layouts are legal and priced, and its figures are those of its rows."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.layout import Layout, check

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("step_times")
    for name in ("step_times", "train_step", "peers"):
        sys.modules.pop(name, None)


def test_fifteen_layouts_that_the_runtime_trains(bench):
    assert len(set(bench.LAYOUTS)) == 15
    for text in bench.LAYOUTS:
        check(Layout.parse(text), bench.MODEL, bench.WORKLOAD, bench.RANKS)


def test_order_counts_where_times_are_apart(bench):
    def row(predicted, measured):
        return bench.Row("dp=2", predicted, 0.9 * predicted, 1.1 * predicted, {"matmul": predicted}, [measured] * 3)

    rows = [row(1.0, 1.0), row(0.99, 1.05), row(2.0, 2.0), row(1.9, 4.0)]
    # The first two are too close to have an order; of the other five pairs one is the wrong way round.
    assert bench.tau(rows) == (pytest.approx((4 - 1) / 5), 5)
    figures = bench.describe(rows[:3])
    assert figures["mean_abs_error"] == pytest.approx((0.06 / 1.05) / 3)
    assert figures["inside"] == 1.0 and figures["kendall_tau"] == 1.0
    assert bench.describe([replace(rows[3], rounds=[1.9])])["inside"] == 1.0
