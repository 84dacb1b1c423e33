"""Policies of parameter servers in virtual time: what they must hold under any order of arrival."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.today import EVERYTHING
from shardwise.errors import UserError
from shardwise.schedule.staleness import AtOnce, ByStep, Gradient, Outcome, Reply, check, simulate

STEPS = 12
SCHEDULES = 10_000
"""Orders of arrival that are injected, in `make test` too: a hundred take a tenth of a second."""


def draw(generator: random.Random) -> tuple[ByStep | AtOnce, int]:
    workers = generator.randint(1, 6)
    kind = generator.choice(["ps", "ssp", "backup", "async"])
    if kind == "async":
        return AtOnce(workers), workers * STEPS
    staleness = generator.randint(0, 4) if kind == "ssp" else 0
    backup = generator.randint(0, workers - 1) if kind == "backup" else 0
    return ByStep(workers, staleness, backup), STEPS


def durations(generator: random.Random) -> dict[tuple[int, int], float]:
    """Equal, slightly different, and very different times, so that orders of all kinds occur."""
    spread = generator.choice([0.0, 0.1, 3.0])
    slow = generator.choice([1.0, 1.0, 3.0, 50.0])
    return {
        (worker, step): (slow if worker == 0 else 1.0) * (1.0 + spread * generator.random())
        for worker in range(6)
        for step in range(6 * STEPS)
    }


@pytest.mark.parametrize("part", range(4))
def test_the_bound_holds_in_injected_schedules(part: int) -> None:
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        generator = random.Random(seed)
        policy, steps = draw(generator)
        times = durations(generator)
        record = simulate(policy, policy.workers, steps, lambda worker, step, times=times: times[worker, step])
        check(record, policy)
        assert policy.version == steps
        if isinstance(policy, ByStep) and not policy.backup:
            assert len(record) == steps * policy.workers
            assert max(one.step - one.read for one in record) <= policy.staleness


def test_lockstep_reads_what_the_step_before_has_written() -> None:
    record = simulate(ByStep(3), 3, 5, lambda worker, step: 1.0 + worker)
    assert all(one.read == one.step == one.update for one in record)


def test_one_worker_at_once_is_sequential() -> None:
    record = simulate(AtOnce(1), 1, 5, lambda worker, step: 1.0)
    assert [(one.step, one.read, one.update) for one in record] == [(n, n, n) for n in range(5)]


def test_a_slow_worker_takes_fewer_shares_at_once_and_holds_all_up_within_a_bound() -> None:
    def seconds(worker: int, step: int) -> float:
        return 3.0 if worker == 0 else 1.0

    at_once = simulate(AtOnce(4), 4, 400, seconds)
    assert len(at_once) == 400
    lockstep = simulate(ByStep(4), 4, 100, seconds)
    assert at_once[-1].arrived == pytest.approx(120, rel=0.05)  # 10 gradients in 3 seconds
    assert lockstep[-1].arrived == 300.0
    bounded = simulate(ByStep(4, staleness=2), 4, 100, seconds)
    assert bounded[-1].arrived == 300.0


def test_a_bound_hides_now_and_then_a_slow_step() -> None:
    generator = random.Random(1)
    times = {(w, s): 3.0 if generator.random() < 0.25 else 1.0 for w in range(4) for s in range(2000)}
    ends = [
        max(one.arrived for one in simulate(ByStep(4, staleness=bound), 4, 2000, lambda w, s: times[w, s]))
        for bound in (0, 2)
    ]
    assert ends[0] / ends[1] > 1.25


class _Early(ByStep):
    """Answers before the gradient of the step that the bound asks for is in the weights."""

    def push(self, worker: int, step: int, read: int) -> Outcome:
        outcome = super().push(worker, step, read)
        if not any(answer.worker == worker for answer in outcome.answers):
            self._waiting.pop(worker)
            outcome.answers.append(Reply(worker, self.version, step + 1))
        return outcome


class _Loses(ByStep):
    """Forgets a gradient and makes the update without it."""

    def push(self, worker: int, step: int, read: int) -> Outcome:
        outcome = super().push(worker, step, read)
        return outcome._replace(updates=[u._replace(gradients=u.gradients[1:]) for u in outcome.updates])


class _Skips(ByStep):
    """Counts an update that it does not make."""

    def push(self, worker: int, step: int, read: int) -> Outcome:
        outcome = super().push(worker, step, read)
        return outcome._replace(updates=[u for u in outcome.updates if u.version != 3])


@pytest.mark.parametrize("wrong", [_Early, _Loses, _Skips])
def test_wrong_policies_are_caught(wrong: type[ByStep]) -> None:
    policy = wrong(3, staleness=1)
    record = simulate(policy, 3, 20, lambda worker, step: 1.0 + 4 * worker)
    with pytest.raises(UserError):
        check(record, policy)


@given(st.integers(1, 5), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=300 if EVERYTHING else 50)
def test_a_changed_record_is_refused(workers: int, bound: int, generator: random.Random) -> None:
    """Older weights than the bound allows, in any place of a record."""
    policy = ByStep(workers, staleness=bound)
    record = simulate(policy, workers, STEPS, lambda worker, step: generator.uniform(1, 5))
    at = generator.randrange(len(record))
    changed = list(record)
    changed[at] = Gradient(*record[at])._replace(read=record[at].step - bound - 1)
    with pytest.raises(UserError):
        check(changed, policy)
