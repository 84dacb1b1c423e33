"""What splitting adds to a step's measured arithmetic."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model.catalog import get
from shardwise.predict.time import StepShape
from shardwise.predict.traffic.ledger import predict_ledger
from shardwise.schedule.choose import cost

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from scaling_model import step_time

MODEL = get("llama-3-8b")


def plan_of(text: str, batch: int = 16):
    return unit_plan(MODEL, Layout.parse(text), Workload(seq=512, batch=batch))


def test_one_rank_takes_its_arithmetic_alone() -> None:
    time = step_time(plan_of("dp=1"), 2.0, Cluster.parse("1xH100"))
    assert time == (2.0, 0.0, 0.0) and time.low == time.high == 2.0


def test_every_ledger_row_is_priced_once() -> None:
    cluster, plan = Cluster.parse("8xH100"), plan_of("tp=8,sp")
    total = sum(r.count * cost(r.op, r.payload_bytes / r.count, 8, cluster).seconds for r in predict_ledger(plan))
    time = step_time(plan, 1.0, cluster)
    assert time.exposed == pytest.approx(total) and time.hideable == 0


def test_gathers_after_the_optimizer_are_exposed() -> None:
    cluster = Cluster.parse("8xH100")
    first, third = (step_time(plan_of(f"dp=8,zero={zero}"), 1.0, cluster) for zero in (1, 3))
    assert first.exposed > 100 * third.exposed and third.hideable > first.hideable


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["dp=16", "dp=16,zero=3", "dp=4,tp=4,zero=1,sp", "dp=2,tp=8"]), st.floats(1.0, 100.0))
def test_a_slower_link_never_makes_a_step_faster(layout: str, factor: float) -> None:
    cluster = Cluster.parse("2x8xH100")
    assert cluster.inter.bandwidth is not None
    slower = replace(cluster, inter=replace(cluster.inter, bandwidth=cluster.inter.bandwidth / factor))
    fast, slow = (step_time(plan_of(layout), 1.0, c) for c in (cluster, slower))
    assert fast.low <= slow.low * (1 + 1e-12) and fast.high <= slow.high * (1 + 1e-12)
    assert 1.0 <= fast.low <= fast.high


def test_stages_of_one_device_hold_all_blocks():
    one = StepShape.of(Layout.parse("stages=4"), Workload(seq=128, batch=1))
    assert one.layers_held(4) == StepShape.of(Layout(), Workload(seq=128, batch=1)).layers_held(4) == (4, 4)
