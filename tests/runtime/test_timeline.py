"""Timelines of real steps: overlap is seen where it is, nowhere else, and recording disturbs nothing."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.pool import run_ranks
from harness.reference import Case
from harness.space import MODELS, SEQ, Point, point
from harness.timeline_jobs import DELAY, Recorded
from shardwise.layout import Layout, Workload
from shardwise.report.exposure import COMMUNICATION, COMPUTE, WAITING, TimeSpan, exposure, overlap, union
from shardwise.runtime.measure.timeline import TimelineCollective


def recorded(chosen: Point, overlapping: bool) -> list[Recorded]:
    payload = (chosen.case, chosen.layout, overlapping)
    return run_ranks("harness.timeline_jobs:record", chosen.layout.ranks, payload)


def stream(run: Recorded, name: str) -> list[TimeSpan]:
    return [span for span in run.timeline if span.stream == name]


def intervals(spans: list[TimeSpan]) -> list[tuple[int, int]]:
    return union((span.start, span.stop) for span in spans)


def assert_whole(run: Recorded) -> None:
    """The rank computes or stands still at any moment, and each collective of the ledger is in the timeline once."""
    figures = exposure(run.timeline)
    compute, waiting = intervals(stream(run, COMPUTE)), intervals(stream(run, WAITING))
    assert overlap(compute, waiting) == []
    assert union([*compute, *waiting]) == [(0, figures.step)]
    collectives = stream(run, COMMUNICATION)
    assert all(0 <= span.start <= span.stop <= figures.step for span in collectives)
    told = ("phase", "op", "axes", "unit", "bytes")
    assert Counter(tuple(span.args[name] for name in told) for span in collectives) == Counter(
        {(r.phase, r.op, r.axes, r.unit, r.payload_bytes // r.count): r.count for r in run.ledger}
    )
    assert len(run.transport) == len(run.ledger) > 0
    for carried, row in zip(run.transport, run.ledger, strict=True):
        assert carried.time_s is not None and carried.wait_s is not None
        assert carried.time_s >= carried.wait_s >= 0
        assert carried.time_s >= DELAY * row.count, "a collective lasts until it is complete"
    assert run.left == []


POINTS = {
    "zero=3": point(model="llama", dp=2, zero=3, accumulate=2),
    "tp=2": point(model="llama", tp=2),
    "recompute=input": point(model="qwen3", dp=2, zero=2, recompute="input", accumulate=2),
}


@pytest.mark.parametrize("name", POINTS)
def test_overlap_hides_communication_and_changes_no_bit(name: str) -> None:
    chosen = POINTS[name]
    on, off = (recorded(chosen, overlapping) for overlapping in (True, False))
    for run, plain in zip(on, off, strict=True):
        assert_whole(run)
        assert_whole(plain)
        assert exposure(run.timeline).hidden > 0
        # Whoever waits for each collective at once cannot compute during one, however long anything takes.
        assert exposure(plain.timeline).hidden == 0
        assert all(kind.hidden == 0 for kind in exposure(plain.timeline).kinds)
        assert (run.losses, run.pieces) == (plain.losses, plain.pieces)
        assert run.ledger == plain.ledger


def test_prefetched_gathers_lie_under_the_computation_of_other_parts() -> None:
    for run in recorded(POINTS["zero=3"], True):
        hidden = {
            (gather.args["unit"], part.name)
            for gather in stream(run, COMMUNICATION)
            for part in stream(run, COMPUTE)
            if gather.args["op"] == "all_gather_into" and gather.start < part.stop and part.start < gather.stop
        }
        assert {("blocks.0", "forward embedding"), ("head", "forward blocks.1")} <= hidden


def test_every_part_is_on_the_compute_stream_in_the_order_of_the_step() -> None:
    (run, _) = recorded(POINTS["recompute=input"], True)
    seen = list(dict.fromkeys(span.name for span in stream(run, COMPUTE)))
    forward = ["forward embedding", "forward blocks.0", "forward blocks.1", "forward head"]
    assert [name for name in seen if name.startswith("forward")] == forward
    backward = ["backward head", "backward blocks.1", "backward blocks.0", "backward embedding"]
    assert [name for name in seen if name.startswith("backward")] == backward
    assert "recompute blocks.0" in seen and "loss" in seen
    assert seen.index("backward embedding") < seen.index("optimizer step") < seen.index("optimizer's new parameters")


# -- one collective, moment by moment


class Clock:
    def __init__(self) -> None:
        self.time = 0

    def now(self) -> int:
        return self.time

    def mark(self, stream: str, name: str) -> int:
        return self.time

    def resume(self) -> int:
        return self.time

    def since_start(self, moment: int) -> int:
        return moment


def flown(*moments: tuple[int, str]) -> TimelineCollective:
    """A collective issued at 10 to which the named things happen."""
    clock: Any = Clock()
    future: torch.futures.Future[None] = torch.futures.Future()
    flight = TimelineCollective(clock, ("forward", "all_reduce", "dp", "head", "float32", 4), 10)
    flight.follow([SimpleNamespace(get_future=lambda: future)])
    for clock.time, what in moments:
        future.set_result(None) if what == "complete" else getattr(flight, what)()
    return flight


END = 100


@pytest.mark.parametrize(
    ("moments", "done", "still"),
    [
        ([(30, "complete"), (50, "awaited"), (51, "arrived")], 30, 0),
        ([(20, "awaited"), (50, "complete"), (51, "arrived")], 50, 30),
        ([(20, "awaited"), (50, "arrived"), (55, "complete")], 50, 30),
        ([(20, "awaited"), (50, "arrived")], 50, 30),
        ([(30, "complete")], 30, 0),
        ([], END, 0),
    ],
    ids=["done before it is waited for", "waited for", "told late", "never told", "never waited for", "left alone"],
)
def test_a_collective_lasts_until_it_is_complete(moments: list[tuple[int, str]], done: int, still: int) -> None:
    assert flown(*moments).times(END) == (10, done, still)


def test_a_collective_without_a_future_lasts_until_the_rank_goes_on() -> None:
    clock: Any = Clock()
    flight = TimelineCollective(clock, ("forward", "all_reduce", "dp", "head", "float32", 4), 0)
    flight.follow([object()])
    clock.time = 7
    flight.awaited()
    clock.time = 9
    flight.arrived()
    assert flight.times(END) == (0, 9, 2)


def test_messages_whose_end_gloo_does_not_tell_are_in_the_timeline() -> None:
    layout = Layout.parse("pp=2,precision=fp32")
    case = Case(MODELS["llama"], Workload(SEQ, 3), layout.precision, layout.attention)
    for run in run_ranks("harness.timeline_jobs:record", 2, (case, layout, True)):
        step = exposure(run.timeline).step
        assert union([*intervals(stream(run, COMPUTE)), *intervals(stream(run, WAITING))]) == [(0, step)]
        messages = [span for span in stream(run, COMMUNICATION) if span.args["op"] in ("send", "recv")]
        assert len(messages) == 2 * 3 and all(0 <= span.start <= span.stop <= step for span in messages)
        assert run.left == []


def test_a_recorded_step_that_fails_leaves_nothing_behind() -> None:
    (left,) = run_ranks("harness.timeline_jobs:fail", 1, POINTS["tp=2"].case)
    assert left == []
