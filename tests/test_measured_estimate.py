"""`benchmarks/measured_estimate.py`: its layouts are legal and run in shares, and its numbers are those of its rows."""

import importlib
import sys
from pathlib import Path

import pytest

from harness.measured_cpu import cluster
from shardwise.emulate.measured_step import ShareSettings, plan_shares
from shardwise.layout import Layout
from shardwise.predict import estimate

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("measured_estimate")
    for name in ("measured_estimate", "train_step", "peers"):
        sys.modules.pop(name, None)


def test_twelve_layouts_of_at_most_two_ranks_in_one_round_each(bench):
    assert len(set(bench.CASES)) == 12
    for text, backend in bench.CASES:
        layout = Layout.parse(text)
        model, here = bench.subject(layout), cluster(ranks=layout.ranks)
        report = estimate(model, layout, bench.WORKLOAD, here, backend=backend)
        assert report.time and layout.ranks <= 2
        plan = plan_shares(model, layout, bench.WORKLOAD, here, report, ShareSettings("cpu", backend, "a test"))
        assert plan.rounds == (tuple(range(layout.ranks)),)
        assert plan.job(plan.rounds[0], "").prices or layout.ranks == 1


def test_an_error_is_the_median_of_rounds_and_the_spread_that_of_real_steps(bench):
    row = bench.Row("dp=2", "shared", 1.5, [1.0, 2.0, 3.0], [1.1, 2.0, 3.6], [])
    assert row.error == pytest.approx(0.1) and row.plain_error == pytest.approx(-0.25)
    assert row.spread == pytest.approx((2.5 - 1.5) / 2 / 2) and row.allowed == pytest.approx(0.5)
    steady = bench.Row("tp=2", "gloo", 1.0, [1.0] * 3, [0.8] * 3, [])
    assert steady.allowed == bench.LIMIT
    numbers = bench.summary([row, steady])
    assert numbers["mean_abs_error"] == pytest.approx(0.15) and numbers["mean_allowed"] == pytest.approx(0.3)
    assert numbers["inside"] == 0.5
