"""Predictions of `sync=local` without running it: what an outer step takes, and over which links it goes."""

from dataclasses import replace

import pytest

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import get
from shardwise.predict import estimate
from shardwise.predict.step_seconds import StepTiming, step_seconds

MODEL, WORK = get("llama-3-8b"), Workload(4096, 64)
NEAR = Cluster.parse("2x8xH100")
FAR = replace(NEAR, inter=replace(NEAR.inter, bandwidth=1e9 / 8))
"""The same nodes with 1 Gbit/s between them."""
LOCAL = "dp=16,zero=3,replicas=2,sync=local,recompute=full"


def timing(words: str, cluster: Cluster = NEAR) -> StepTiming:
    return step_seconds(MODEL, Layout.parse(f"{LOCAL},{words}"), WORK, cluster)


def test_a_step_has_its_share_of_an_outer_step() -> None:
    ten, hundred = timing("every=10"), timing("every=100")
    assert ten.parts["outer"] == pytest.approx(10 * hundred.parts["outer"])
    assert {k: v for k, v in ten.parts.items() if k != "outer"} == {
        k: v for k, v in hundred.parts.items() if k != "outer"
    }
    assert ten.seconds == pytest.approx(sum(ten.parts.values())) and ten.low < ten.seconds < ten.high
    assert "mean of a round" in ten.notes[-1]


def test_a_slow_link_between_replicas_costs_outer_steps_alone() -> None:
    near, far = timing("every=50,outer=nesterov"), timing("every=50,outer=nesterov", FAR)
    assert near.parts["data"] == far.parts["data"]
    assert far.parts["outer"] > 10 * near.parts["outer"]
    # 4 bytes of each of 8 billion parameters between two nodes, over 8 links of 1 Gbit/s, of which training runs reach
    # a share.
    least = 8.03e9 / 8 * 4 * 8 / 1e9
    assert least < far.parts["outer"] * 50 < 3 * least
    lockstep = step_seconds(MODEL, Layout.parse("dp=16,zero=3,shard=8,recompute=full"), WORK, FAR)
    assert lockstep.seconds > 2 * far.seconds


def test_few_bits_cost_less_where_the_link_is_slow() -> None:
    seconds = [timing(f"every=50,outer=nesterov,outer_bits={bits}", FAR).parts["outer"] for bits in (0, 8, 4)]
    # Twice on the wire, by an all-to-all and an all-gather; in 8 bits a quarter of the bytes each way, in 4 an eighth.
    assert seconds[0] > 1.5 * seconds[1] > 2.5 * seconds[2]


def test_an_estimate_says_which_step_it_is_of() -> None:
    report = estimate(MODEL, f"{LOCAL},every=50,outer=nesterov", WORK, NEAR)
    assert any("one in 50" in note for note in report.notes)
    rows = [row for role in report.roles for row in role.ledger if row.axes == "replica"]
    assert sum(row.payload_bytes for row in rows) == pytest.approx(8.03e9 / 8 * 4, rel=0.01)
    plain = estimate(MODEL, "dp=16,zero=3,shard=8,recompute=full", WORK, NEAR)
    extra = report.roles[0].bytes.optimizer - plain.roles[0].bytes.optimizer
    assert extra == pytest.approx(8.03e9 / 8 * 8, rel=0.01)
