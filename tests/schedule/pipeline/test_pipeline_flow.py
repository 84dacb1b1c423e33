"""The one pass over the lists finds what the engine finds for the lowered program, message by message."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_executor import schedules

from harness.lowered_pipeline import lower
from harness.play import Compute, play
from shardwise.report.exposure import exposures
from shardwise.report.trace import trace_events
from shardwise.schedule.pipeline import Action, build, complete
from shardwise.schedule.pipeline.action import COMPUTE
from shardwise.schedule.pipeline.flow import flow
from shardwise.schedule.pipeline.memory import MicroBatchMemory, levels, peaks
from shardwise.schedule.pipeline.plan import PipelineSchedule, loop
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.timeline import report
from shardwise.schedule.pipeline.times import Times
from shardwise.schedule.sending import Instruction as Primitive
from shardwise.schedule.sending import Program


@dataclass(frozen=True)
class PipelineClock:
    """Seconds of the messages of a lowered pipeline, for `play(..., ports="pair")`."""

    times: Times

    def message(self, src: int, dst: int, elements: int) -> float:
        hop = self.times.hop if self.times.overlap else 0.0
        return (0.0, hop, self.times.tied)[elements]

    def addition(self, elements: int) -> float:
        return 0.0


@st.composite
def times_of(draw, schedule: PipelineSchedule) -> Times:
    """Any times, by stage, in whole seconds, so that sums are exact."""
    each = st.lists(st.integers(0, 5), min_size=schedule.stages, max_size=schedule.stages).map(tuple)
    forward, input, weight, gather, reduce = (draw(each) for _ in range(5))
    return Times(
        forward, input, weight, hop=draw(st.integers(0, 7)), overlap=draw(st.booleans()), gather=gather, reduce=reduce,
        tied=draw(st.integers(0, 5)),
    )  # fmt: skip


def by_action(schedule: PipelineSchedule, times: Times) -> list[dict[str, tuple[float, float]]]:
    """Rank -> action -> (start, end), by the engine."""
    program = lower(schedule, times)
    played = play(program, PipelineClock(times), ports="pair")
    assert not played.stuck and not played.problems
    found: list[dict[str, tuple[float, float]]] = []
    for actions, spans in zip(program.actions, played.spans, strict=True):
        mine: dict[str, tuple[float, float]] = {}
        for action, (start, end) in zip(actions, spans, strict=True):
            first, last = mine.get(action.label, (start, end))
            mine[action.label] = (min(first, start), max(last, end))
        found.append(mine)
    return found


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_it_is_the_engine_s(data):
    schedule = data.draw(schedules())
    times = data.draw(times_of(schedule))
    engine, found = by_action(schedule, times), flow(schedule, times)
    assert found.waiting == []
    for mine, spans, wanted in zip(schedule.actions, found.spans, engine, strict=True):
        for action, span in zip(mine, spans, strict=True):
            # A stage may be gathered twice under one name; its gathers show in the computations that wait for them.
            if str(action) in wanted and action.kind != "UNSHARD":
                # Messages and exchanges begin with their posting, for the engine with their transfer.
                exact = action.kind in COMPUTE or action.kind == "REDUCE_GRAD"
                assert (span if exact else span[1:]) == (wanted[str(action)] if exact else wanted[str(action)][1:])


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(6)), st.permutations(range(6)))
def test_stuck_ranks_are_the_engine_s(first, second):
    """Any order of three micro-batches on two ranks that each rank by itself could follow."""

    def order(stage: int, drawn: list[int]) -> list[Action]:
        ranks = {k: sorted([drawn.index(2 * k), drawn.index(2 * k + 1)]) for k in range(3)}
        events = [
            (at, Action(kind, stage, k)) for k, pair in ranks.items() for at, kind in zip(pair, "FB", strict=True)
        ]
        return [action for _, action in sorted(events)]

    schedule = complete("any", [order(0, first), order(1, second)], loop(2, 1), 3)
    played = play(lower(schedule), ports="pair")
    stuck = {}
    for one in played.stuck:
        if one.action.kind == "compute":
            stuck.setdefault(one.rank, one.action.label)
    assert {waiting.rank: str(waiting.action) for waiting in flow(schedule).waiting} == stuck


def test_messages_go_on_beside_computations_unless_they_do_not():
    schedule = build("gpipe", 2, 4)
    times = Times.equal(2, 2, 2, 2)
    beside = simulate(schedule, times.with_hop(1))
    still = simulate(schedule, times.with_hop(0.5, 0.25, 2, overlap=False))
    assert beside.makespan == 4 * 6 + 6 + 2 * 1
    assert still.makespan == beside.makespan + 2 * 3, "three more messages each way stand in the way"


def test_reductions_of_a_stage_run_while_others_compute():
    schedule = build("interleaved", 2, 4, 2)
    times = replace(Times.equal(4, 1, 1, 1), reduce=(0, 0, 2, 2))
    assert simulate(schedule, times).makespan == simulate(schedule, Times.equal(4, 1, 1, 1)).makespan
    last = replace(Times.equal(4, 1, 1, 1), reduce=(2, 2, 0, 0))
    assert simulate(schedule, last).makespan == simulate(schedule, Times.equal(4, 1, 1, 1)).makespan + 2


def test_a_gather_delays_what_needs_it():
    schedule = build("1f1b", 2, 2, zero=3)
    times = replace(Times.equal(2, 1, 1, 1), gather=(5, 0))
    assert simulate(schedule, times).computing[0][0] == (5, 6)


def test_a_deadlock_has_no_times():
    zero = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    one = [Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0)]
    with pytest.raises(ValueError, match="deadlocks"):
        simulate(complete("crossed", [zero, one], loop(2, 1), 2), Times.none(2))


# -- what was added to the engine


class Second:
    def message(self, src: int, dst: int, elements: int) -> float:
        return 1.0

    def addition(self, elements: int) -> float:
        return 0.0


def test_links_of_pairs_do_not_share_a_rank_s_port():
    def to(peer: int, kind: str) -> Primitive:
        return Primitive(kind, peer, ((0, 1),))  # type: ignore[arg-type]

    program = Program(
        ((to(1, "send"), to(2, "send"), to(2, "send")), (to(0, "recv"),), (to(0, "recv"), to(0, "recv"))), 1
    )
    assert play(program, Second()).seconds == 3
    assert play(program, Second(), ports="pair").seconds == 2


def test_a_stream_works_beside_the_rank():
    beside = [Compute(s, stream=stream) for s, stream in ((2, ""), (3, "x"), (2, "x"), (2, ""))]
    played = play(Program((tuple(beside),), 0))
    assert played.spans == [[(0, 2), (0, 3), (3, 5), (2, 4)]]


# -- memory and timelines


def test_what_f_i_and_w_each_free():
    schedule = build("zb-h1", 2, 2)
    held = MicroBatchMemory.shared(schedule, saved=10, weight=4, rebuilt=0)
    steps = [
        (str(schedule.actions[1][level.place]), level.forward, level.weight, level.held)
        for level in levels(schedule, 1, held)
    ]
    assert steps == [
        ("1F0", 1, 0, 10),
        ("1I0", 0, 1, 4),
        ("1F1", 1, 1, 14),
        ("1I1", 0, 2, 8),
        ("1W0", 0, 1, 4),
        ("1W1", 0, 0, 0),
    ]
    assert [peak[:4] for peak in peaks(schedule, held)] == [(2, 1, 2, 20), (1, 2, 2, 14)]


def test_recompute_keeps_little_and_rebuilds_one_at_a_time():
    schedule = build("gpipe", 2, 8)
    assert peaks(schedule, MicroBatchMemory.shared(schedule, 1, 1, 0))[0].held == 8
    assert peaks(schedule, MicroBatchMemory.shared(schedule, 0.125, 1, 0.875))[0].held == 8 * 0.125 + 0.875


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_nothing_is_held_in_the_end(schedule):
    for rank in range(schedule.ranks):
        last = list(levels(schedule, rank))[-1:]
        assert all((level.forward, level.weight) == (0, 0) and abs(level.held) < 1e-9 for level in last)


def test_timelines_are_step_reports():
    schedule = build("zb-v", 2, 4, 2, zero=3, tied=True)
    times = replace(Times.equal(4, 2, 2, 2).with_hop(1), gather=(1,) * 4, reduce=(1,) * 4)
    simulated = simulate(schedule, times)
    found = report(simulated)
    assert type(found).from_json(found.to_json()) == found
    for (rank, exposure), busy in zip(exposures(found), simulated.busy, strict=True):
        assert exposure.compute == busy * 1e9 and exposure.step <= simulated.makespan * 1e9
        assert {kind.op for kind in exposure.kinds} >= {"send", "recv", "all_gather_into", "reduce"}
        waiting = [event for event in found.roles[rank].timeline if event["stream"] == "waiting"]
        spans = simulated.computing[rank]
        assert sum(event["duration_s"] for event in waiting) == spans[-1][1] - busy
    assert len(trace_events(found)["traceEvents"]) > 100
