import json
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from shardwise.errors import UserError
from shardwise.schedule.staleness import AtOnce, ByStep, Update, check, simulated
from shardwise.schedule.update_record import UpdateRecord, read_records


def drawn(seed: int) -> UpdateRecord:
    """A run of any policy in virtual time, with workers of any speed."""
    generator = random.Random(seed)
    workers = generator.randint(1, 5)
    kinds = [ByStep(workers), ByStep(workers, generator.randint(1, 3)), AtOnce(workers)]
    policy = generator.choice([*kinds, ByStep(workers, backup=generator.randint(0, workers - 1))])
    slow = [generator.choice([1.0, 1.0, 4.0]) for _ in range(workers)]
    return simulated(policy, workers, 30, lambda worker, step: slow[worker] * (1 + generator.random()))


@pytest.mark.parametrize("seed", range(40))
def test_its_counts_are_those_of_what_it_lists(seed: int) -> None:
    record = drawn(seed)
    assert record.left_out == 0 and len(record.updated) == record.updates == 30
    assert record.dropped == sum(one.update is None for one in record.gradients)
    assert record.staleness == Counter(one.staleness for one in record.gradients if one.update is not None)
    for worker, tally in enumerate(record.workers):
        own = [one for one in record.gradients if one.worker == worker]
        assert (tally.gradients, tally.dropped) == (len(own), sum(one.update is None for one in own))
        assert tally.computing == pytest.approx(sum(one.arrived - one.started for one in own))
        assert tally.waiting == pytest.approx(sum(one.answered - one.arrived for one in own))
        for other in range(len(record.workers)):
            waits = [one.answered - one.arrived for one in own if one.waited_for == other]
            assert tally.waited_for.get(other, 0.0) == pytest.approx(sum(waits))
        if len(own) > 1:  # in virtual time the next gradient begins with the answer
            assert [one.started for one in own[1:]] == [one.answered for one in own[:-1]]


def test_who_waits_for_whom_in_lockstep_is_the_slowest() -> None:
    record = simulated(ByStep(3), 3, 4, lambda worker, step: 3.0 if worker == 1 else 1.0 + worker / 10)
    assert [one.waited_for for one in record.gradients if one.worker != 1] == [1] * 8
    assert [one.waited_for for one in record.gradients if one.worker == 1] == [None] * 4
    assert record.workers[0].waited_for == {1: pytest.approx(8.0)} and record.workers[1].waiting == 0
    assert record.slowness() == pytest.approx([1 / 1.2, 2.5, 1.0])
    assert record.workers[0].waiting_share == pytest.approx(2 / 3)


def test_a_long_run_lists_its_beginning_and_counts_all() -> None:
    def play(record: UpdateRecord) -> UpdateRecord:
        for step in range(50):
            for worker in range(2):
                record.push(worker, step, step, float(step), step + 0.5)
            record.update(Update(step, step, ((0, step), (1, step))), step + 0.75)
            for worker in range(2):
                record.answer(worker, step + 1.0)
        return record

    whole, short = play(UpdateRecord(2)), play(UpdateRecord(2, most=20))
    assert (len(short.gradients), len(short.updated), short.left_out) == (20, 20, 80)
    assert short.gradients == whole.gradients[:20] and all(one.update is not None for one in short.gradients)
    listed = {"listed_gradients", "left_out_gradients"}
    assert {k: v for k, v in short.summary().items() if k not in listed} == {
        k: v for k, v in whole.summary().items() if k not in listed
    }


@pytest.mark.parametrize("seed", range(10))
def test_a_file_that_is_written_in_parts_is_the_whole(seed: int) -> None:
    """Every run is cut where no gradient is on its way, as ranks meet."""
    record = drawn(seed)
    lines = [json.dumps({"server": 0, **record.fresh()}), json.dumps({"server": 0, **record.fresh()})]
    (again,) = read_records(map(json.loads, lines))
    assert again.gradients == [
        one._replace(started=round(one.started, 6), arrived=round(one.arrived, 6), answered=round(one.answered, 6))
        for one in record.gradients
    ]
    assert again.staleness == record.staleness and again.updates == record.updates
    assert json.loads(lines[1])["gradients"] == {} and json.loads(lines[0])["begins"]


def test_a_resumed_run_counts_from_its_first_update() -> None:
    policy = ByStep(2, version=7)
    record = simulated(policy, 2, 10, lambda worker, step: 1.0 + worker)
    assert [one.update for one in record.gradients] == [7, 7, 8, 8, 9, 9] and record.first == 7
    check(record.gradients, policy, first=7)
    with pytest.raises(UserError, match="leave some out"):
        check(record.gradients, policy)
    before = {"server": 0, **simulated(ByStep(2), 2, 4, lambda worker, step: 1.0).fresh()}
    (last,) = read_records([before, {"server": 0, **record.fresh()}])
    assert (last.first, last.updates, len(last.gradients)) == (7, 3, 6)


@pytest.mark.parametrize(
    "damage",
    [
        lambda part: part.pop("workers"),
        lambda part: part.update(begins=False),
        lambda part: part["gradients"].pop("read"),
        lambda part: part["gradients"].update(worker=[0]),
        lambda part: part["gradients"].update(worker=["one"] * 8),
        lambda part: part.update(staleness=[1, 2]),
        lambda part: part.update(updated="no"),
    ],
)
def test_a_damaged_record_is_one_line(damage: Callable[[dict[str, Any]], object]) -> None:
    part = {"server": 0, **simulated(ByStep(2), 2, 4, lambda worker, step: 1.0).fresh()}
    assert read_records([json.loads(json.dumps(part))])
    damage(part)
    with pytest.raises(UserError, match="the record of updates is damaged"):
        read_records([part])


def test_an_empty_record_says_so() -> None:
    summary = UpdateRecord(2).summary()
    assert (summary["updates"], summary["mean_staleness"], summary["max_staleness"]) == (0, 0.0, 0)
    assert [one["slowness"] for one in summary["workers"]] == [0.0, 0.0]
    assert not any(isinstance(value, float) and math.isnan(value) for value in summary.values())
