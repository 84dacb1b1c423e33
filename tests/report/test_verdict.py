"""The verdict on a recorded step: parts that add up, each cause from spans alone, and none where there is none."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.report.exposure import TimeSpan, length, overlap, without
from shardwise.report.rank_timelines import Recorded, aligned
from shardwise.report.run_directory import RunDirectory
from shardwise.report.step_parts import PARTS, step_parts
from shardwise.report.verdict import run_spans, verdict, verdict_of

MS = 1_000_000
Spans = list[TimeSpan]


class Rank:
    """The spans of one rank, written one after another in milliseconds."""

    def __init__(self, at: float = 0) -> None:
        self.spans: Spans = []
        self.at = at

    def add(self, stream: str, name: str, duration: float, start: float | None = None, **args: Any) -> "Rank":
        begin = self.at if start is None else start
        self.spans.append(TimeSpan(name, stream, round(begin * MS), round((begin + duration) * MS), args))
        self.at = max(self.at, begin + duration) if start is None else self.at
        return self

    def compute(self, name: str, duration: float, **args: Any) -> "Rank":
        return self.add("compute", name, duration, **args)

    def call(self, until: float, op: str = "all_reduce", axes: str = "dp", size: int = 1 << 20, **args: Any) -> "Rank":
        return self.add("communication", f"{op} x", until - self.at, op=op, axes=axes, bytes=size, unit="x", **args)


def usual(extra: float = 0, name: str = "start of the step", rank: int = 0, ranks: int = 3) -> dict[int, Spans]:
    """Ranks that compute 100 ms and meet in one collective of 2 ms; one of them first does something else."""
    made = {}
    for each in range(ranks):
        one = Rank().compute("start of the step", 1)
        if each == rank and extra:
            one.compute(name, extra)
        made[each] = one.compute("forward blocks.0", 100).call(103 + extra).spans
    return made


def every(make: Callable[[Rank], Rank]) -> dict[int, Spans]:
    return {rank: make(Rank()).spans for rank in range(2)}


def with_part(name: str, spans: float, ms: float) -> dict[int, Spans]:
    return every(lambda one: one.compute(name, spans).compute("recompute blocks.0", ms))


def pipelined() -> dict[int, Spans]:
    """Stage 0 has three blocks, stage 1 one, each of 50 ms."""
    first, second = Rank(), Rank()
    for block in range(3):
        first.compute(f"forward blocks.{block}", 50)
    first.call(151, "send", "pp", ranks=[0, 1])
    second.call(151, "recv", "pp", ranks=[0, 1]).compute("forward blocks.3", 50)
    return {0: first.spans, 1: second.spans}


def many(count: int, size: int) -> dict[int, Spans]:
    def make(one: Rank) -> Rank:
        for _ in range(count):
            one.compute("forward blocks.0", 1).call(one.at + 1, axes="tp", size=size)
        return one

    return every(make)


def micro_batches(count: int, ms: float) -> dict[int, Spans]:
    def make(one: Rank) -> Rank:
        one.add("data", "loading text", 0.1, micro_batches=count, tokens=16 * count)
        for _ in range(count):
            one.compute("forward blocks.0", ms).compute("backward blocks.0", ms)
        return one

    return every(make)


def run_of(step_ms: float, **between: float) -> Spans:
    """Three steps; something after the second."""
    events: list[dict[str, Any]] = [{"step": n + 1, "time": n + 1.0, "seconds": step_ms / 1e3} for n in range(3)]
    return run_spans([*events[:2], {"step": 2, "time": 2.5, **between}, events[2]])


CAUSES = {
    "slow rank": lambda: verdict(usual(80)),
    "slow link": lambda: verdict(every(lambda one: one.compute("forward blocks.0", 10).call(100, axes="tp"))),
    "no overlap": lambda: verdict(every(lambda one: one.compute("forward blocks.0", 60).call(100))),
    "recomputation": lambda: verdict(with_part("forward blocks.0", 60, 20)),
    "uneven stages": lambda: verdict(pipelined()),
    "imbalance of experts": lambda: verdict(usual(80, "forward blocks.0"), rows={0: 90, 1: 5, 2: 5}),
    "host-bound": lambda: verdict(every(lambda one: one.compute("forward blocks.0", 100, core_wait_s=0.06))),
    "slow disk": lambda: verdict(every(lambda one: one.compute("forward x", 60).add("waiting", "for disk", 40))),
    "slow data": lambda: verdict(every(lambda one: one.add("data", "loading text", 40).compute("forward x", 60))),
    "validation": lambda: verdict(usual(), run_of(100, validation_s=0.3)),
    "many small collectives": lambda: verdict(many(80, 4096)),
    "tiny micro-batches": lambda: verdict(micro_batches(32, 0.5)),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_first_line_names_the_cause(cause: str) -> None:
    found = CAUSES[cause]()
    assert found.findings and found.findings[0].cause == cause
    assert found.line == f"{found.line.partition(';')[0]}; {found.findings[0].words}"
    assert cause == "slow rank" or cause in found.line
    assert json.loads(json.dumps(found.to_json()))["cause"] == cause


CLEAN = {
    "equal ranks": lambda: verdict(usual()),
    "one rank": lambda: verdict({0: Rank().compute("forward blocks.0", 100).spans}),
    "transfers behind computation": lambda: verdict(
        every(lambda one: one.compute("forward blocks.0", 100).add("communication", "x", 95, start=5, bytes=1 << 20))
    ),
    "a pipeline's bubble": lambda: verdict(
        {
            0: Rank().compute("forward blocks.0", 50).call(51, "send", "pp", ranks=[0, 1]).spans,
            1: Rank().call(51, "recv", "pp", ranks=[0, 1]).compute("forward blocks.1", 50).spans,
        }
    ),
    "many micro-batches that are long": lambda: verdict(micro_batches(32, 20)),
    "validations at its ends": lambda: verdict(usual(), run_spans([{"step": 0, "time": 1.0, "validation_s": 9.0}])),
    "large collectives, many": lambda: verdict(usual(), run_of(100, saving_s=0.001)),
    "emulated arithmetic that waited for a core": lambda: verdict(
        every(lambda one: one.compute("forward blocks.0", 100, core_wait_s=0.06).add("emulated", "x", 70, start=30))
    ),
    "nothing recorded": lambda: verdict({}),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_step_has_no_cause(name: str) -> None:
    found = CLEAN[name]()
    assert not found.findings and found.to_json()["cause"] is None
    assert not found.seconds or found.line.endswith("no cause stands out")


def test_the_slow_rank_is_named_with_its_milliseconds_and_who_lost_them() -> None:
    made = usual(820, rank=1, ranks=4)
    assert verdict(made).line == "923 ms; rank 1 began 820 ms late; ranks 0,2-3 lost 820 ms there"
    marked = made | {1: [*made[1], TimeSpan("injected waiting", "injected", MS, 821 * MS, {})]}
    assert verdict(marked).line == "923 ms; rank 1 began 820 ms late (injected); ranks 0,2-3 lost 820 ms there"
    plain, told = verdict(made).findings, verdict(marked).findings
    assert [replace(one, words="") for one in plain] == [replace(one, words="") for one in told]
    slower = usual(80, "forward blocks.0", rank=2)
    assert "rank 2 computed 80.0 ms longer than the others" in verdict(slower).line


def test_foreign_spans_need_no_more_than_stream_name_begin_and_end() -> None:
    made = usual(80)
    bare = {rank: [replace(span, args={}) for span in spans] for rank, spans in made.items()}
    assert verdict(bare).findings[0].cause == "slow rank" and verdict(bare).line == verdict(made).line


# -- parts


@st.composite
def recordings(draw: st.DrawFn) -> dict[int, Spans]:
    streams = st.sampled_from(["compute", "communication", "waiting", "data", "disk", "injected"])
    names = st.sampled_from(["for disk", "forward blocks.1", "all_reduce x"])
    span = st.builds(
        lambda stream, name, start, long, op: TimeSpan(name, stream, start, start + long, {"op": op, "axes": "dp"}),
        streams, names, st.integers(0, 50), st.integers(0, 30), st.sampled_from(["all_reduce", "send", "recv"]),
    )  # fmt: skip
    return {rank: draw(st.lists(span, max_size=12)) for rank in range(draw(st.integers(1, 4)))}


@given(recordings())
def test_the_parts_of_every_rank_add_up_to_the_step(recording: dict[int, Spans]) -> None:
    parts = step_parts(recording)
    for one in parts.ranks:
        assert sum(one.of(name) for name in PARTS) == parts.step
        assert all(one.of(name) >= 0 for name in PARTS)
        assert one.rank not in one.others
    assert sum(parts.mean(name) for name in PARTS) == pytest.approx(parts.step / 1e9)
    assert sum(one.of("others") for one in parts.ranks) == sum(call.lost for call in parts.arrivals)
    verdict(recording)


@given(*(st.lists(st.tuples(st.integers(0, 40), st.integers(41, 60)), max_size=4) for _ in range(2)))
def test_what_is_left_of_a_union_and_what_is_shared_make_the_whole(a: Any, b: Any) -> None:
    from shardwise.report.exposure import union

    a, b = union(a), union(b)
    left = without(a, b)
    assert overlap(left, b) == [] and union([*left, *overlap(a, b)]) == a
    assert length(left) + length(overlap(a, b)) == length(a)


def test_the_last_to_arrive_is_told_for_each_collective() -> None:
    (call,) = step_parts(usual(80, rank=2)).arrivals
    assert (call.last, call.late, call.lost, call.ranks) == (2, 80 * MS, 2 * 80 * MS, (0, 1, 2))


def test_groups_meet_apart() -> None:
    pairs = {rank: Rank().compute("forward x", 10 + rank).call(20, ranks=[rank // 2 * 2, rank // 2 * 2 + 1]).spans
             for rank in range(4)}  # fmt: skip
    assert [call.ranks for call in step_parts(pairs).arrivals] == [(0, 1), (2, 3)]
    assert {one.rank: one.others for one in step_parts(pairs).ranks} == {0: {1: MS}, 1: {}, 2: {3: MS}, 3: {}}


def test_a_run_on_disk_has_its_verdict(tmp_path: Path) -> None:
    events = [
        {"name": name, "stream": stream, "start_s": start, "duration_s": seconds, "args": args}
        for name, stream, start, seconds, args in (
            ("forward blocks.0", "compute", 0.0, 0.1, {}),
            ("all_reduce x", "communication", 0.1, 0.01, {"op": "all_reduce", "axes": "dp", "ranks": [0, 1]}),
        )
    ]
    with RunDirectory.create(tmp_path / "run", {"status": "finished"}) as run:
        assert verdict_of(run) is None
        run.append({"step": 1, "time": 1.0, "seconds": 0.1})
        run.append({"step": 1, "time": 2.0, "validation_s": 0.5})
        run.append({"step": 2, "time": 3.0, "seconds": 0.1})
        run.write_timelines(
            aligned({0: Recorded("here", 0, tuple(events)), 1: Recorded("here", 0, tuple(events))}, 4, 2)
        )
        found = verdict_of(run)
    assert found is not None and found.number == 4
    assert found.text().startswith("step 4: 110 ms; validation") and found.text("x").startswith("x: step 4")
