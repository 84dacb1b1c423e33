"""Pretended pipelines: everything but the arithmetic is real, and it is what the schedule says."""

import json
from itertools import pairwise

import pytest
import torch

from harness.pool import run_ranks
from shardwise.emulate import worker
from shardwise.emulate.job import EmulationCase, EmulationJob, EmulationResult, measure, one_by_one, result_of
from shardwise.emulate.worker import ActionLog, ActionTime, TimedWorker
from shardwise.schedule.pipeline import Action, build, find, generators
from shardwise.schedule.pipeline.memory import peaks
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times

WAIT = 0.0005


def case(name: str, p: int, m: int, **options: int) -> EmulationCase:
    schedule = build(name, p, m, find(name).virtual, **options)
    return EmulationCase.shared(schedule, WAIT, WAIT, WAIT, 100_001, 0.3)


@pytest.fixture(scope="module")
def every() -> EmulationResult:
    cases = [case(g.name, 2, 4, zero=3, tied=True) for g in generators()]
    return measure(cases, 4096, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> EmulationResult:
    cases = case("interleaved", 4, 4, tied=True), case("zb-v", 4, 5, zero=2)
    out = tmp_path_factory.mktemp("four") / "result.json"
    run_ranks("shardwise.emulate.rank:run", 4, EmulationJob(cases, 64, 1, "gloo", timeout=60.0, out=str(out)))
    return result_of(cases, json.loads(out.read_text()))


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> EmulationResult:
    """Messages that wait for a rank's other stages, or for other tokens, over gloo: more micro-batches than 3p."""
    cases = case("breadth-first", 2, 7), case("decode", 2, 8, tokens=3)
    out = tmp_path_factory.mktemp("many") / "result.json"
    run_ranks("shardwise.emulate.rank:run", 2, EmulationJob(cases, 64, 1, "gloo", timeout=30.0, out=str(out)))
    return result_of(cases, json.loads(out.read_text()))


@pytest.mark.parametrize("which", ["every", "four", "many"])
def test_every_rank_does_its_list_and_holds_what_it_should(which, request):
    found = request.getfixturevalue(which)
    assert found.transport == ("shared" if which == "every" else "gloo") and found.hop > 0
    for each in found.cases:
        expected = peaks(each.case.schedule, each.case.held)
        assert each.held == tuple(peak.held for peak in expected), each.case.schedule.name
        assert each.buffers == tuple(peak.buffers for peak in expected)
        for step in each.steps:
            leaves = [[leaf for action in mine for leaf in action.leaves()] for mine in each.case.schedule.actions]
            assert [list(mine) for mine in step.schedule.actions] == leaves
            assert [len(spans) for spans in step.spans] == [len(mine) for mine in leaves]
            for spans in step.computing:
                assert all(start <= end for start, end in spans)
                assert all(before[1] <= after[0] for before, after in pairwise(spans))


@pytest.mark.parametrize("which", ["every", "four", "many"])
def test_nothing_is_computed_before_what_it_needs(which, request):
    """All processes have one clock, so that causes must lie before effects on it."""
    for each in request.getfixturevalue(which).cases:
        schedule = each.case.schedule
        for step in each.steps:
            spans = {
                (action.kind, action.stage, action.micro): span
                for mine, found in zip(step.schedule.actions, step.spans, strict=True)
                for action, span in zip(mine, found, strict=True)
            }
            for (kind, stage, micro), (start, end) in spans.items():
                source = schedule.input_of(stage, micro) if kind == "F" else None
                if source:
                    assert spans["F", *source][1] <= start
                if kind in ("I", "B") and stage + 1 < schedule.stages:
                    above = spans.get(("I", stage + 1, micro)) or spans["B", stage + 1, micro]
                    assert above[1] <= start
                if kind == "RECV_F":
                    assert spans["SEND_F", *schedule.input_of(stage, micro)][0] <= end


def test_figures_of_a_step_are_those_of_its_spans(every):
    for each in every.cases:
        assert each.median in each.steps and each.median.makespan == min(step.makespan for step in each.steps)
        assert each.median.makespan >= max(each.median.own_span) >= max(each.median.busy) > 0


def test_the_simulation_is_that_of_the_schedule(every):
    for each in every.cases:
        times = Times.shared(each.case.schedule, WAIT, WAIT, WAIT)
        for overlap in (True, False):
            hopping = Times(times.forward, times.input, times.weight, hop=0.25, tied=0.25, overlap=overlap)
            assert each.simulated(0.25, overlap).spans == simulate(each.case.schedule, hopping).spans


def test_a_rank_s_share_is_cut_into_stages():
    whole, parts = case("1f1b", 2, 4), case("zb-v", 2, 4)
    assert whole.times.forward == (WAIT, WAIT) and parts.times.forward == (WAIT / 2,) * 4
    assert whole.held.saved == (100_001,) * 2 and whole.held.weight == (30_000,) * 2
    assert parts.held.saved == (50_000,) * 4 and parts.held.weight == (15_000,) * 4


def test_jobs_are_read_as_they_were_written(tmp_path):
    cases = tuple(case(g.name, 3, 6, zero=3, tied=True) for g in generators())
    job = EmulationJob(cases, 64, 3, "gloo", timeout=60.0, out="out.json")
    (tmp_path / "job.json").write_text(json.dumps(job.to_json()))
    assert EmulationJob.read(tmp_path / "job.json") == job
    assert "OVERLAP_F_B" in json.dumps([each.to_json() for each in cases])


def test_pairs_are_taken_apart():
    schedule = build("dualpipe-v", 2, 4, 2)
    apart = one_by_one(schedule)
    kinds = {action.kind for mine in apart.actions for action in mine}
    assert "OVERLAP_F_B" not in kinds and {"F", "B"} <= kinds
    both = [sum(len(action.leaves()) for mine in each.actions for action in mine) for each in (schedule, apart)]
    assert both[0] == both[1]


def test_a_rank_that_leaves_its_list_is_found():
    record = ActionLog()
    actions = [Action("F", 0, 0), Action("SEND_F", 0, 0, 1), Action("OVERLAP_F_B", parts=(Action("F", 0, 1),))]
    for what in ("0F0", "send", "0F1"):
        record.moments.append(ActionTime(record, what))
    assert len(record.spans(actions)) == 3
    with pytest.raises(RuntimeError, match=r"action 1 of 3, did \['send'\]"):
        record.spans([actions[0], Action("RECV_F", 0, 1, 1), actions[2]])
    with pytest.raises(RuntimeError, match="action 3 of 4"):
        record.spans([*actions, Action("W", 0, 0)])


class NoComms:
    def index(self, axes: tuple[str, ...]) -> int:
        return 1


def test_a_message_must_be_the_one_that_is_needed():
    mine = TimedWorker(case("1f1b", 2, 2), NoComms(), 64)
    other = TimedWorker(case("1f1b", 2, 2), NoComms(), 64)
    assert mine.forward(1, 0, other.forward(0, 0, None)) is None
    with pytest.raises(RuntimeError, match="another one came"):
        mine.forward(1, 1, other.forward(0, 0, None))
    with pytest.raises(RuntimeError, match="another one came"):
        other.backward(0, 0, torch.zeros(8, dtype=torch.int64), weights=True)


def test_input_gradients_free_what_weights_do_not_need():
    mine = TimedWorker(case("zb-h1", 2, 2), NoComms(), 64)
    for micro in range(2):
        mine.forward(1, micro, None)
    assert (
        mine.held == 2 * 100_001 == mine.most_held == sum(part.numel() for each in mine.kept.values() for part in each)
    )
    mine.backward(1, 0, None, weights=False)
    assert mine.held == 100_001 + 30_000 == sum(part.numel() for each in mine.kept.values() for part in each)
    mine.backward_of_weights(1, 0)
    mine.backward(1, 1, None, weights=True)
    assert mine.held == 0 and not mine.kept and mine.most_held == 2 * 100_001


class Clock:
    """Time that passes in sleeps alone, each of which takes `late` too long."""

    def __init__(self, late: float) -> None:
        self.now, self.late = 0.0, late

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late


def test_late_wake_ups_are_made_up_for_unless_the_rank_stood_still(monkeypatch):
    clock = Clock(late=1.0)
    monkeypatch.setattr(worker, "time", clock)
    schedule = build("gpipe", 1, 8)
    mine = TimedWorker(EmulationCase.shared(schedule, 10, 10, 10), NoComms(), 64)
    for micro in range(4):
        mine.forward(0, micro, None)
    assert clock.now == 41
    clock.now += 5
    mine.record.stood += 5
    mine.forward(0, 4, None)
    assert clock.now == 41 + 5 + 11
