"""Where a step's time went: the arithmetic of spans against counting every nanosecond, and parts that add up."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UserError
from shardwise.report import Bytes, Role, StepReport
from shardwise.report.exposure import STREAMS, TimeSpan, exposure, exposures, length, overlap, spans, union

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


@st.composite
def timelines(draw: st.DrawFn) -> list[TimeSpan]:
    made = []
    for start, stop in draw(intervals):
        args = {"op": draw(st.sampled_from(["all_reduce", "all_gather_into"])), "axes": draw(st.sampled_from("dt"))}
        made.append(TimeSpan("x", draw(st.sampled_from(STREAMS)), start, stop, args | {"bytes": 10}))
    return made


def moments(pairs) -> set[int]:
    return {moment for start, stop in pairs for moment in range(start, stop)}


def seen(timeline: list[TimeSpan], stream: str, **args: str) -> set[int]:
    chosen = (s for s in timeline if s.stream == stream and s.args | args == s.args)
    return moments((s.start, s.stop) for s in chosen)


def event(name="f", stream="compute", start_s=0.0, duration_s=1.0, **more):
    return {"name": name, "stream": stream, "start_s": start_s, "duration_s": duration_s} | more


def role(*timeline) -> Role:
    return Role("all", (2, 3), Bytes(), (), (), tuple(timeline))


@given(intervals, intervals)
def test_unions_and_overlaps_are_those_of_sets(a, b):
    joined = union(a)
    assert moments(joined) == moments(a) and length(joined) == len(moments(a))
    assert all(one[1] < two[0] for one, two in pairwise(joined)), "neighbours are joined"
    assert moments(overlap(joined, union(b))) == moments(a) & moments(b)
    assert length(overlap(joined, union(b))) == len(moments(a) & moments(b))


@given(timelines())
def test_figures_are_those_of_counting_every_moment(timeline):
    found = exposure(timeline)
    compute, under_way, waiting = (seen(timeline, stream) for stream in STREAMS)
    assert found.step == max((span.stop for span in timeline), default=0)
    assert (found.compute, found.communication, found.waiting) == (len(compute), len(under_way), len(waiting))
    assert found.exposed == len(under_way - compute) <= found.communication
    assert found.hidden == len(under_way & compute)
    assert found.idle == found.step - len(compute | under_way) >= 0
    assert found.compute + found.exposed + found.idle == found.step
    assert found.share(found.step) == (1.0 if found.step else 0.0)


@given(timelines())
def test_kinds_of_traffic_are_those_of_counting_every_moment(timeline):
    found = exposure(timeline)
    compute = seen(timeline, "compute")
    collectives = [span for span in timeline if span.stream == "communication"]
    assert {(kind.op, kind.axes) for kind in found.kinds} == {span.kind for span in collectives}
    assert sum(kind.calls for kind in found.kinds) == len(collectives)
    for kind in found.kinds:
        mine = seen(timeline, "communication", op=kind.op, axes=kind.axes)
        assert (kind.time, kind.exposed, kind.hidden) == (len(mine), len(mine - compute), len(mine & compute))
        assert kind.bytes == 10 * kind.calls and kind.exposed <= found.exposed


@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)), max_size=5))
def test_nanoseconds_survive_being_seconds(pairs):
    made = role(*(event(start_s=start / 1e9, duration_s=length / 1e9) for start, length in pairs))
    assert [(span.start, span.stop) for span in spans(made)] == [(start, start + length) for start, length in pairs]


def test_a_collective_that_is_half_hidden():
    gather = event("gather w", "communication", 0.5, 1.0, args={"op": "all_gather_into", "axes": "dp", "bytes": 64})
    timeline = role(
        event(), gather, event("for gather w", "waiting", 1.0, 0.6), event("g", start_s=1.6, duration_s=0.4)
    )
    ((rank, found),) = exposures(StepReport("measured", {}, "dp=2", {}, "", (timeline,)))
    assert rank == 2
    assert found.to_json() == {
        "step_s": 2.0,
        "compute_s": 1.4,
        "communication_s": 1.0,
        "hidden_s": 0.5,
        "exposed_s": 0.5,
        "waiting_s": 0.6,
        "idle_s": 0.1,
        "exposed_share": 0.25,
        "kinds": [
            {"op": "all_gather_into", "axes": "dp", "calls": 1, "bytes": 64}
            | {"time_s": 1.0, "hidden_s": 0.5, "exposed_s": 0.5}
        ],
    }
    assert found.sentence(2) == "communication: 50.0% of the step, 25.0% hidden, 25.0% exposed (rank 2)"


def test_collectives_that_tell_nothing_go_by_their_name_and_roles_without_timeline_are_left_out():
    (kind,) = exposure(spans(role(event("send", "communication", args={"bytes": "many"})))).kinds
    assert (kind.op, kind.axes, kind.bytes) == ("send", "", 0)
    assert exposures(StepReport("measured", {}, "", {}, "", (replace(role(), ranks=(0,)),))) == ()


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ({"name": "f", "stream": "compute", "start_s": 1.0}, "duration_s is missing"),
        (event(start_s=-1.0), "no span of time"),
        (event(duration_s=float("inf")), "no span of time"),
        (event(start_s=1e300), "no span of time"),
        (event(start_s=10**400), "must be numbers of seconds"),
        (event(args=[1]), "args must be an object"),
    ],
)
def test_damaged_events_are_named(damaged, message):
    with pytest.raises(UserError, match=f"timeline event 1 of role 'all'.*{message}"):
        spans(role(event(), damaged))
