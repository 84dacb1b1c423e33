"""Parameter servers: in lockstep one device's training, within a bound what the bound allows, and to the byte what is
predicted."""

import json
import random

import pytest

from harness.pool import run_ranks
from harness.reference import Case, reference
from harness.server_jobs import Served, ServedOutcome
from harness.today import EVERY_LAYOUT, seed
from shardwise.layout import Layout, Workload
from shardwise.layout.sync import policy_of
from shardwise.model import ModelConfig
from shardwise.predict import estimate
from shardwise.schedule.staleness import check as prove
from shardwise.schedule.update_record import UpdateRecord, read_records

STUMBLING = ModelConfig(
    "served", vocab=59, hidden=29, layers=2, heads=4, kv_heads=2, head_dim=6, ffn=41, max_positions=16, tied=True,
    qk_norm=True, dropout=0.1,
)  # fmt: skip
WITH_BIASES = ModelConfig(
    "biased", vocab=31, hidden=24, layers=3, heads=4, kv_heads=4, head_dim=6, ffn=20, max_positions=16,
    norm="layernorm", positions="learned", activation="gelu", gated=False, bias="all",
)  # fmt: skip
CASES = 40
TODAY = 6
Lags = dict[tuple[int, int], float]
SYNCS = ("ps", "ps", "ssp,staleness=0", "ssp,staleness=2", "async", "async,damped", "ps,backup=1")


def layouts() -> list[tuple[str, ModelConfig]]:
    """One to six workers of one or two ranks, one to three servers among them or beside them, every way to agree."""
    generator, found = random.Random(5), []
    while len(found) < CASES:
        dp, tp = generator.randint(1, 6), generator.choice([1, 1, 2])
        count, own = generator.randint(1, 3), generator.random() < 0.5
        sync = generator.choice(SYNCS)
        ranks = dp * tp + (count if own else 0)
        if ranks > 8 or (not own and count > dp * tp) or ("backup" in sync and dp == 1):
            continue
        sp = generator.choice(["", "sp,"]) if tp > 1 else ""
        micro = generator.choice([1, 2])
        text = f"dp={dp},tp={tp},{sp}sync={sync},servers={count}{':own' if own else ''},micro={micro},precision=fp64"
        found.append((text, generator.choice([STUMBLING, WITH_BIASES])))
    return found


def chosen() -> list[tuple[str, ModelConfig]]:
    every = layouts()
    return every if EVERY_LAYOUT else random.Random(seed()).sample(every, TODAY)


def run(
    text: str, model: ModelConfig, delays: tuple[float, ...] = (), steps: int = 3, lags: Lags | None = None
) -> tuple[Case, list[ServedOutcome]]:
    layout = Layout.parse(text)
    case = Case(model, Workload(seq=12, batch=2 * layout.dp * layout.micro), steps=steps)
    outcomes = run_ranks(
        "harness.server_jobs:serve", layout.ranks, Served(case, layout, reference(case), delays, lags or {})
    )
    return case, outcomes


def check(text: str, case: Case, outcomes: list[ServedOutcome]) -> None:
    layout, workers = Layout.parse(text), outcomes[: Layout.parse(text).training_ranks]
    expected = reference(case)
    shares = layout.dp if layout.sync == "async" else 1
    if (layout.sync in ("ps", "ssp") and not layout.staleness and not layout.backup) or layout.dp == 1:
        scale = sum(float(tensor.square().sum()) for tensor in expected.final.values()) ** 0.5
        for worker in workers:
            assert worker.losses == pytest.approx(expected.losses, rel=1e-12)
            assert worker.norms == pytest.approx(expected.norms, rel=1e-10)
            assert sum(worker.errors.values()) ** 0.5 <= 1e-10 * scale
    for rank, worker in enumerate(workers):  # all have the last weights
        twin = workers[rank % layout.tp]
        assert all(bool((a == b).all()) for a, b in zip(worker.weights, twin.weights, strict=True))
    records = [one.record for one in outcomes if one.record is not None]
    assert len(records) == layout.parameter_servers.count
    for server, record in enumerate(records):
        check_record(record, layout, case.steps * shares)
        pushes = [worker.pushes[server] for worker in workers[:: layout.tp]]
        assert pushes == [tally.gradients for tally in record.workers]
    if layout.sync != "async":
        assert all(step - read <= layout.staleness for worker in workers for step, read in worker.reads)


def check_record(record: UpdateRecord, layout: Layout, updates: int) -> None:
    """Every gradient of a real run is in one update or dropped by the rules, and read what the bound allows; its file
    says the same."""
    prove(record.gradients, policy_of(layout))
    assert record.updates == updates == len(record.updated) and not record.left_out
    assert record.pushed == len(record.gradients) == sum(record.staleness.values()) + record.dropped
    assert layout.backup or not record.dropped
    assert record.updated == sorted(record.updated)
    for worker in range(layout.dp):  # it has read what this server had handed over
        own = [one for one in record.gradients if one.worker == worker]
        handed_over = [sum(at <= one.answered for at in record.updated) for one in own]
        first, *later = (one.read for one in own)
        assert later == handed_over[:-1]
        # A worker that begins late finds what others' gradients have changed by then.
        assert first <= (sum(at <= own[0].arrived for at in record.updated) if layout.sync == "async" else 0)
    for one in record.gradients:
        assert 0 <= one.started <= one.arrived <= one.answered
        assert one.update is None or one.arrived <= record.updated[one.update]
    (again,) = read_records([json.loads(json.dumps({"server": 0, **record.fresh()}))])
    assert (again.staleness, again.updates, again.first) == (record.staleness, record.updates, record.first)
    assert [tally.gradients for tally in again.workers] == [tally.gradients for tally in record.workers]
    for one, other in zip(again.gradients, record.gradients, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


@pytest.mark.layouts(lambda text, model: Layout.parse(text))
@pytest.mark.parametrize(("text", "model"), chosen(), ids=lambda value: value if isinstance(value, str) else value.name)
def test_servers(text: str, model: ModelConfig) -> None:
    case, outcomes = run(text, model)
    check(text, case, outcomes)
    layout = Layout.parse(text)
    predicted = {
        rank: role
        for role in estimate(model, layout, case.workload, backend=outcomes[0].backend).roles
        for rank in role.ranks
    }
    for rank, outcome in enumerate(outcomes[: layout.training_ranks]):
        assert outcome.role is not None
        assert outcome.role.ledger == predicted[rank].ledger
        measured, expected = outcome.role.bytes, predicted[rank].bytes
        for name in ("parameters", "gradients", "optimizer", "comm"):
            assert getattr(measured, name) in (getattr(expected, name), 0), name
        if measured.parameters:
            assert measured.saved == expected.saved
            assert measured.total == pytest.approx(expected.total, rel=0.05)


def test_trap_31_two_servers_train_as_one_device() -> None:
    text = "dp=3,sync=ps,servers=2,precision=fp64"
    case, outcomes = run(text, STUMBLING)
    check(text, case, outcomes)


def test_the_bound_holds_with_a_slow_worker() -> None:
    """One worker sleeps: the others are up to two steps ahead of it, never more."""
    text = "dp=3,sync=ssp,staleness=2,servers=2,precision=fp64"
    case, outcomes = run(text, STUMBLING, delays=(0.15, 0.0, 0.0), steps=8)
    check(text, case, outcomes)
    assert max(step - read for step, read in outcomes[1].reads) == 2


def test_a_slow_worker_takes_fewer_shares() -> None:
    text = "dp=3,sync=async,servers=1,precision=fp64"
    case, outcomes = run(text, STUMBLING, delays=(1.0, 0.0, 0.0), steps=8)
    check(text, case, outcomes)
    taken = [sorted(share for share, _ in outcome.reads) for outcome in outcomes]
    assert sorted(share for each in taken for share in each) == list(range(24))
    assert len(taken[0]) < len(taken[1])


def test_the_last_gradient_of_a_step_is_dropped() -> None:
    """One worker sleeps for long: what it pushes comes too late. Every gradient is in an update or dropped."""
    text = "dp=3,sync=ps,backup=1,servers=1:own,precision=fp64"
    case, outcomes = run(text, STUMBLING, delays=(0.0, 0.0, 1.0), steps=6)
    check(text, case, outcomes)
    record = outcomes[3].record
    assert record is not None and record.dropped and record.workers[2].dropped == record.dropped
    pushed = [(worker, step) for worker, outcome in enumerate(outcomes[:3]) for step, _ in outcome.reads]
    assert sorted((one.worker, one.step) for one in record.gradients) == sorted(pushed)


def test_trap_31_servers_that_drop_different_gradients_keep_the_bound() -> None:
    """What one server drops another may still wait for: there a worker continues. Here the second is behind the first,
    and finds the slow worker's gradients in time for later steps."""
    text = "dp=3,sync=ps,backup=1,servers=2:own,precision=fp64"
    lags = {(0, 1): 0.05, (1, 1): 0.05}
    case, outcomes = run(text, STUMBLING, delays=(0.0, 0.0, 0.13), steps=14, lags=lags)
    check(text, case, outcomes)


def test_trap_31_each_server_is_told_the_version_of_its_own_range() -> None:
    text = "dp=3,sync=async,damped,servers=2:own,precision=fp64"
    case, outcomes = run(text, STUMBLING, delays=(0.0, 0.02, 0.02), steps=6, lags={(0, 1): 0.06})
    check(text, case, outcomes)
    first, second = (outcomes[rank].record for rank in (3, 4))
    assert first is not None and second is not None
    assert [one.worker for one in first.gradients] != [one.worker for one in second.gradients]
