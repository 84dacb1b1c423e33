import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given

from harness.report_strategies import reports
from shardwise.errors import UserError
from shardwise.report import Bytes, Role, StepReport
from shardwise.report.trace import trace_events, write_trace


def report(*timelines):
    roles = tuple(Role(f"r{i}", (2 * i, 2 * i + 1), Bytes(), (), (), tuple(t)) for i, t in enumerate(timelines))
    return StepReport("measured", {}, "dp=2", {}, "2xCPU", roles)


def event(name="f", stream="compute", start_s=0.5, duration_s=0.25, **more):
    return {"name": name, "stream": stream, "start_s": start_s, "duration_s": duration_s} | more


def complete(trace):
    return [e for e in trace["traceEvents"] if e["ph"] == "X"]


def test_events_are_in_microseconds_on_their_rank_and_stream():
    trace = trace_events(report([event()], [event("g", "communication"), event("h", start_s=0.1, args={"bytes": 5})]))
    found = {e["name"]: e for e in complete(trace)}
    assert (found["f"]["ts"], found["f"]["dur"], found["f"]["pid"]) == (500_000, 250_000, 0)
    assert found["g"]["pid"] == found["h"]["pid"] == 2 and found["g"]["tid"] != found["h"]["tid"]
    assert found["h"]["args"] == {"bytes": 5}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names[2, found["g"]["tid"]] == "communication" and names[0, found["f"]["tid"]] == "compute"
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"} == {
        "rank 0 (as ranks 0-1)",
        "rank 2 (as ranks 2-3)",
    }


@given(reports())
def test_every_event_once_in_order_with_integer_ids(r):
    assume(any(role.timeline for role in r.roles))
    trace = json.loads(json.dumps(trace_events(r), allow_nan=False))
    for role in r.roles:
        mine = [e for e in complete(trace) if e["pid"] == min(role.ranks)]
        assert sorted(e["name"] for e in mine) == sorted(e["name"] for e in role.timeline)
        assert [e["ts"] for e in mine] == sorted(e["ts"] for e in mine)
        assert all(isinstance(e["tid"], int) and e["dur"] >= 0 for e in mine)


@given(reports())
def test_a_thread_draws_one_event_after_another(r):
    assume(any(role.timeline for role in r.roles))
    trace = trace_events(r)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    by_thread = {}
    for e in complete(trace):
        by_thread.setdefault((e["pid"], e["tid"]), []).append(e)
    assert by_thread.keys() == named.keys()
    for thread, mine in by_thread.items():
        assert {named[thread].rstrip(" 0123456789")} == {e["cat"] for e in mine}
        for one, two in pairwise(mine):
            assert one["ts"] + one["dur"] <= two["ts"] + 1e-3


def test_overlapping_collectives_have_lanes_of_their_own():
    together = [event(n, "communication", start, 0.5) for n, start in (("a", 0.0), ("b", 0.25), ("c", 0.5))]
    trace = trace_events(report([*together, event()]))
    threads = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {e["name"]: threads[e["tid"]] for e in complete(trace)} == {
        "a": "communication",
        "b": "communication 2",
        "c": "communication",
        "f": "compute",
    }


def test_file_is_strict_json(tmp_path):
    write_trace(report([event(args={"loss": float("nan"), "deep": [float("inf")]})]), tmp_path / "t.json")

    def refuse(text):
        raise AssertionError(text)

    trace = json.loads((tmp_path / "t.json").read_text(), parse_constant=refuse)
    assert complete(trace)[0]["args"] == {"loss": "NaN", "deep": ["Infinity"]}


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ({k: v for k, v in event().items() if k != "start_s"}, "start_s is missing"),
        (event(duration_s="long"), "numbers of seconds"),
        (event(duration_s=-1.0), "no span of time"),
        (event(start_s=float("nan")), "no span of time"),
    ],
)
def test_damaged_events_are_named(damaged, message):
    with pytest.raises(UserError, match=f"timeline event 1 of role 'r0'.*{message}"):
        trace_events(report([event(), damaged]))


def test_no_timeline_and_no_place_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="no timeline"):
        trace_events(report([]))
    with pytest.raises(UserError, match="cannot write"):
        write_trace(replace(report([event()])), tmp_path / "none" / "t.json")
