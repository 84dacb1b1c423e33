"""Predicted steps with slow ranks: closed forms where there are some, and the servers' own policies in virtual time."""

import numpy as np
import pytest

from shardwise.cluster import Cluster
from shardwise.layout import Layout, Mesh, Workload
from shardwise.layout.axes import REPLICA
from shardwise.model.catalog import get
from shardwise.predict import estimate
from shardwise.predict.step_seconds import step_seconds
from shardwise.predict.time.stragglers import StraggledStep, straggled_step
from shardwise.schedule.staleness import AtOnce, simulate
from shardwise.schedule.stragglers import Stragglers

MODEL = get("tiny-llama")
ALWAYS, OFTEN = "rank=1,factor=3", "rank=all,factor=3,probability=0.25"
STEPS = 4000


def step(text: str, slow: str, rest: float = 0.0, steps: int = STEPS, seed: int = 3) -> StraggledStep:
    return straggled_step(MODEL, Layout.parse(text), Stragglers.parse([slow], seed), 1.0, rest, steps)


@pytest.mark.parametrize("text", ["dp=4", "dp=4,zero=3", "tp=4", "pp=2,dp=2", "dp=4,sync=ps", "dp=4,sync=ssp"])
def test_lockstep_waits_for_the_slowest(text: str) -> None:
    assert step(text, ALWAYS, rest=0.5).seconds == pytest.approx(3.5)
    # The maximum of four two-point variables.
    assert step(text, OFTEN, rest=0.5).seconds == pytest.approx(1 + 2 * (1 - 0.75**4) + 0.5, rel=0.02)


def test_rates_add_up_without_waiting() -> None:
    assert step("dp=4,sync=async", ALWAYS).seconds == pytest.approx(4 / (3 + 1 / 3))
    assert step("dp=4,sync=async", ALWAYS, rest=0.5).seconds == pytest.approx(4 / (3 / 1.5 + 1 / 3.5))
    assert step("dp=4,sync=async", OFTEN).seconds == pytest.approx(1 + 2 * 0.25, rel=0.02)


@pytest.mark.parametrize("slow", [ALWAYS, OFTEN, "rank=all,spread=0.4"])
def test_rates_are_those_of_the_policy_in_virtual_time(slow: str) -> None:
    factors = Stragglers.parse([slow], 3).factors(range(4), np.arange(4 * STEPS))
    record = simulate(AtOnce(4), 4, 4 * STEPS, lambda worker, share: factors[worker][share] + 0.2)
    assert step("dp=4,sync=async", slow, rest=0.2).seconds == pytest.approx(record[-1].arrived / STEPS, rel=0.02)


def test_a_bound_hides_slow_steps_but_not_a_slow_worker() -> None:
    lockstep, bounded, loose = (step(f"dp=4,sync=ssp,staleness={s}", OFTEN).seconds for s in (0, 2, 50))
    assert lockstep / bounded > 1.3 and bounded > loose > 1.5 * 0.98
    always = step("dp=4,sync=ssp,staleness=2", ALWAYS)
    assert always.seconds == pytest.approx(3, rel=0.01) and "2 steps behind" in always.why


def test_backup_workers_are_not_waited_for() -> None:
    """One of four is always slow and may be left out."""
    assert step("dp=4,sync=ps,backup=1", ALWAYS, rest=0.25).seconds == pytest.approx(1.25, rel=0.01)


def test_replicas_wait_once_in_a_round() -> None:
    assert step("dp=4,sync=local,every=20", ALWAYS).seconds == pytest.approx(3)
    found = {every: step(f"dp=4,sync=local,every={every}", OFTEN).seconds for every in (1, 4, 20, 400)}
    assert found[1] == pytest.approx(1 + 2 * (1 - 0.75**4), rel=0.02)
    assert found[1] > found[4] > found[20] > found[400] > 1.5 * 0.98
    factors = Stragglers.parse([OFTEN], 3).factors(range(4), np.arange(STEPS))
    rounds = [factors[:, at : at + 20].sum(axis=1).max() for at in range(0, STEPS, 20)]
    assert found[20] == pytest.approx(sum(rounds) / STEPS)


@pytest.mark.parametrize("text", ["dp=2,tp=2,sync=async", "dp=4,replicas=2,sync=local,every=4"])
def test_a_replica_is_as_slow_as_its_slowest_rank(text: str) -> None:
    """Of four ranks in two replicas, in steps of the maximum of two."""
    layout = Layout.parse(text)
    mesh = Mesh.of(layout, MODEL)
    columns = STEPS * (layout.dp if layout.sync == "async" else 1)
    factors = Stragglers.parse([OFTEN], 3).factors(range(4), np.arange(columns))
    replicas = [
        np.max([factors[rank] for rank in range(4) if mesh.index(REPLICA, rank) == place], axis=0) for place in (0, 1)
    ]
    if layout.sync == "async":
        expected = 2 / sum(1 / replica.mean() for replica in replicas)
    else:
        sums = [replica.reshape(-1, 4).sum(axis=1) for replica in replicas]
        expected = np.maximum(*sums).mean() / 4
    assert step(text, OFTEN).seconds == pytest.approx(expected)
    assert expected > 1 + 2 * (1 - 0.75**2) - 0.02


def test_without_slow_ranks_a_step_is_what_it_was() -> None:
    cluster, work = Cluster.parse("8xH100"), Workload(512, 8)
    plain = step_seconds(MODEL, Layout.parse("dp=8"), work, cluster)
    assert step_seconds(MODEL, Layout.parse("dp=8"), work, cluster, slow=Stragglers(())) == plain
    slowed = step_seconds(MODEL, Layout.parse("dp=8"), work, cluster, slow=Stragglers.parse([ALWAYS]))
    arithmetic = sum(plain.parts[name] for name in ("matmul", "attention", "memory"))
    assert slowed.seconds == pytest.approx(plain.seconds + 2 * arithmetic)
    assert slowed.seconds == pytest.approx(sum(slowed.parts.values()))
    assert any("waits for the slowest of 8 ranks" in note for note in slowed.notes)


def test_emulated_arithmetic_takes_the_place_of_the_predicted() -> None:
    report = estimate(MODEL, "dp=4", Workload(512, 8), "4xH100", slow=Stragglers.parse([ALWAYS]), emulated=0.25)
    assert report.timing is not None
    parts = report.timing["parts"]
    assert parts["emulated"] == 0.25 and parts["stragglers"] == pytest.approx(0.5)
    assert not {"matmul", "attention", "memory", "host"} & parts.keys()
    assert report.time == pytest.approx(sum(parts.values()))


@pytest.mark.parametrize("text", ["dp=256,sync=async", "dp=256,sync=ssp,staleness=4", "dp=512,tp=2"])
def test_many_ranks_make_fewer_steps(text: str) -> None:
    found = straggled_step(MODEL, Layout.parse(text), Stragglers.parse([OFTEN]), 1.0, 0.1)
    assert 1.5 < found.seconds <= 3.1 * 1.01
