"""The first difference of ranks, on calls that are written here: what is named, and what is no difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest

from shardwise.audit.calls import Call
from shardwise.audit.differences import first_difference
from shardwise.audit.reading import RankRecording, StepMark
from shardwise.audit.waits import late_ranks

WORLD = (0, 1, 2, 3)
ORDERS = count()


def call(line: int, size: int = 4, step: int = 0, **more: object) -> Call:
    values = {"op": "all_reduce", "group": WORLD, "dtype": "float32", "comm": "0", **more}
    return Call(0, 0, inputs=size, outputs=size, where=f"train.py:{line}", step=step, **values)  # type: ignore[arg-type]


def steps(calls: Sequence[Call], times: int = 4) -> list[Call]:
    return [replace(one, step=step) for step in range(times) for one in calls]


def recordings(programs: Sequence[Sequence[Call]], marks: int = 4, **more: object) -> list[RankRecording]:
    """One rank per program; calls begin one after the other, in the order of the programs' lines."""
    found = []
    for rank, calls in enumerate(programs):
        own = [replace(one, rank=rank, order=at, begin=float(at)) for at, one in enumerate(calls)]
        stepped = tuple(StepMark(step + 1, float(step), None) for step in range(marks))
        found.append(RankRecording(rank, tuple(own), len(programs), steps=stepped, **more))  # type: ignore[arg-type]
    return found


USUAL = [call(5, 100), call(5, 200), call(7), call(8, 24, dtype="int64")]


def changed(program: Sequence[Call], at: int, *instead: Call) -> list[Call]:
    return [*program[:at], *instead, *program[at + 1 :]]


def test_equal_ranks_do_not_differ() -> None:
    assert first_difference(recordings([steps(USUAL)] * 4)) is None
    assert first_difference([]) is None
    assert first_difference(recordings([steps(USUAL)] * 4, marks=0)) is None


def test_lines_and_sizes_that_may_differ() -> None:
    """if rank == 0: broadcast(...) else: broadcast(...); an all_to_all, and a scatter of what a root alone has."""
    roots = [call(line, 8, op="broadcast", peer=0) for line in (20, 22)]
    exchanged = [call(5, size, op="all_to_all") for size in (64, 80)]
    scattered = [replace(call(6, size, op="scatter", peer=0), outputs=16) for size in (64, 0)]
    mine, yours = (steps(some) for some in zip(roots, exchanged, scattered, strict=True))
    assert first_difference(recordings([mine, *[yours] * 3])) is None


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("kind", "line", "change"),
    [
        ("skipped", 7, lambda p: changed(p, 6)),
        ("size", 7, lambda p: changed(p, 6, call(7, 8, 1))),
        ("dtype", 7, lambda p: changed(p, 6, call(7, 4, 1, dtype="int32"))),
        ("reordered", 8, lambda p: [*p[:6], p[7], p[6], *p[8:]]),
        ("group", 7, lambda p: changed(p, 6, call(7, 4, 1, group=(0, 1), comm="1"))),
        ("extra", 7, lambda p: changed(p, 6, p[6], p[6])),
    ],
)
def test_mistakes_are_named(kind, line, change, ranks) -> None:
    usual = steps(USUAL)
    group = WORLD[:ranks]
    programs = [[replace(one, group=group) for one in usual] for _ in range(ranks)]
    wrong = [one if one.comm == "1" else replace(one, group=group) for one in change(usual)]
    found = first_difference(recordings([*programs[:1], wrong, *programs[2:]]))
    assert found is not None and found.sure and found.ranks == (1,)
    assert (found.kind, found.where) == (kind, f"train.py:{line}")
    assert found.step == 1


def test_a_call_that_is_new_leaves_two_ranks_undecided() -> None:
    """A rank that logs now and then may be right, and the one that does not come wrong; with four, the one is wrong."""
    usual = [replace(one, group=(0, 1)) for one in steps(USUAL)]
    logs = [*usual[:8], replace(call(30, 4, 2), group=(0, 1)), *usual[8:]]
    found = first_difference(recordings([logs, usual]))
    assert found is not None and not found.sure and "train.py:30" in found.text
    usual, logs = steps(USUAL), [*steps(USUAL)[:8], call(30, 4, 2), *steps(USUAL)[8:]]
    found = first_difference(recordings([logs, logs, usual, logs]))
    assert found is not None and found.sure and (found.kind, found.ranks) == ("skipped", (2,))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_new_call_on_another_group(ranks) -> None:
    """Rank 0 alone comes to a barrier, while DeepSpeed's calls have their group. Of two ranks none is surely wrong."""
    group = WORLD[:ranks]
    usual = [replace(one, group=group, comm="deepspeed") for one in steps(USUAL)][:9]
    others = [*usual[:8], replace(usual[8], state="started")]
    alone = [*usual[:8], call(30, 1, 2, op="barrier", state="started", group=group)]
    found = first_difference(recordings([alone, *[others] * (ranks - 1)], marks=2))
    assert found is not None and found.sure == (ranks == 4) and "barrier" in found.text and "all_reduce" in found.text
    assert not found.sure or (found.ranks == (0,) and "it waits in barrier" in found.text)


def test_a_call_on_another_group_is_told_from_a_helper_s() -> None:
    """Of two ranks one is alone in a group where both were together once. A line may reduce over both groups, too."""
    both, last, alone = call(7, group=(0, 1)), call(8, 24, group=(0, 1)), call(7, group=(1,), comm="1")
    waits = [replace(one, state="started") for one in (both, last)]
    found = first_difference(recordings([[both, last, waits[0]], [both, last, alone, waits[1]]], marks=0))
    assert found is not None and (found.kind, found.ranks, found.where) == ("group", (1,), "train.py:7") and found.sure
    programs = [steps([replace(alone, group=(rank,), comm=str(rank)), both, last]) for rank in (0, 1)]
    found = first_difference(recordings([programs[0], programs[1][:7] + programs[1][8:]]))
    assert found is not None and (found.kind, found.ranks, found.where) == ("skipped", (1,), "train.py:7")


def test_of_two_sides_of_a_skip_the_skipping_one_is_said() -> None:
    """Rank 3 has a micro-batch less, and is in the call of all ranks where 2 waits for it in their group."""
    micro, loss = call(5, 100, op="all_gather_into", group=(2, 3), comm="shard"), call(9)
    alone = replace(micro, group=(0, 1))
    ranks = [steps([pair, pair, loss], 3)[:8] for pair in (alone, alone, micro, micro)]
    ranks[2][-1], ranks[3][-1] = (replace(one, step=2, state="started") for one in (micro, loss))
    found = first_difference(recordings(ranks, marks=2))
    assert found is not None and (found.sure, found.ranks, found.where) == (True, (3,), "train.py:5")


def test_a_first_step_says_not_how_many_calls_are_usual() -> None:
    """DeepSpeed's stage 3 gathers parameters singly until it has seen one; rank 1 has a micro-batch less."""
    first, gather, scatter, loss = (
        call(line, size, group=(0, 1)) for line, size in ((5, 10), (5, 60), (5, 80), (9, 4))
    )
    later = [replace(one, step=1) for one in (loss, gather, scatter, gather, loss)]
    whole = [first, scatter, gather, scatter, *later[:4]]
    less = [*whole[:-1], replace(later[4], state="started")]
    found = first_difference(recordings([[*whole[:-1], replace(whole[-1], state="started")], less], marks=1))
    assert found is not None and (not found.sure or found.ranks == (1,))


def test_a_known_call_may_be_one_more_or_come_early() -> None:
    """Rank 1 comes to its loss after two of three micro-batches, and its engine makes no step. Its passes show it."""
    gather, scatter, norm, loss, seen = (call(line, line, group=(0, 1)) for line in (5, 6, 7, 9, 10))
    later = [replace(one, step=1) for one in (loss, seen, *[gather, scatter] * 2)]
    waits = [replace(one, step=1, state="started") for one in (gather, loss)]
    programs = [[*[gather, scatter] * 3, norm, *later, one] for one in waits]
    for sure, passes in ((False, (0,) * 14), (True, (0, 1, 1, 2, 2, 3, 3, 3, 3, 3, 4, 4, 5, 5))):
        counted = [[replace(one, passes=n) for one, n in zip(some, passes, strict=True)] for some in programs]
        mark = StepMark(1, 0.0, None, passes[6])
        found = first_difference([replace(one, steps=(mark,)) for one in recordings(counted)])
        assert found is not None and (found.sure, found.ranks) == (sure, (1,)) and "train.py:5" in found.text
        start = "rank 1 skipped all_reduce of 5 B" if sure else "not sure whether rank 1 made one call more"
        assert found.text.startswith(start) and found.text.endswith("train.py:9: 2, not 3)") == sure


def test_another_operation_of_a_known_line_is_new() -> None:
    """DDP broadcasts its new buckets once; the rank that has a micro-batch less does not come to it."""
    group = {"group": (0, 1)}
    setup = [call(2, 8, op="all_gather", **group), call(2, 288, op="broadcast", peer=0, **group)]
    step = [call(5, 100, **group), call(7, 4, 1, **group), call(8, 24, 1, dtype="int64", **group)]
    buckets = call(5, 52, 1, op="broadcast", dtype="int32", peer=0, state="started", **group)
    rebuilds = recordings([[*setup, *step, buckets]], marks=1)
    less = recordings([[], [*setup, *step, call(7, 4, 2, state="started", **group)]], marks=2)
    found = first_difference([*rebuilds, less[1]])
    assert found is not None and not found.sure and "broadcast" in found.text


def test_who_died_first_is_named_before_those_who_waited() -> None:
    whole = recordings([steps(USUAL)[:9]] * 4, marks=2)
    dead = [replace(one, died=10.0 - (one.rank == 2)) for one in whole]
    found = first_difference(dead)
    assert found is not None and (found.kind, found.ranks, found.where) == ("died", (2,), "train.py:5")


def test_an_error_is_the_cause_unless_it_is_one_of_communication() -> None:
    """Such an error is named where there is nothing else."""
    whole = recordings([steps(USUAL)] * 4)
    whole[1] = replace(whole[1], error=(8.0, "RuntimeError: Connection closed by peer", "train.py:7"))
    for text in ("TypeError: no argument distance", "ValueError: no such token", ""):
        whole[3] = replace(whole[3], error=(9.0, text, "train.py:44") if text else None)
        found = first_difference(whole)
        assert found is not None and found.kind == "error"
        assert (found.ranks, found.where) == (((3,), "train.py:44") if text else ((1,), "train.py:7"))


def test_a_step_without_a_micro_batch() -> None:
    """A rank makes its optimizer's calls, where another has DDP's new buckets, a call of a line that came before."""
    group = {"group": (0, 1)}
    step = [call(5, 100, **group), call(9, 200, op="broadcast", peer=0, **group), call(9, 80, op="broadcast", **group)]
    buckets = call(5, 68, 1, op="broadcast", dtype="int32", peer=0, **group)
    whole = recordings([[*step, buckets, replace(step[0], step=1, state="started")]], marks=1)
    less = recordings([[], [*step, *(replace(one, step=1) for one in step[1:])]], marks=2)
    found = first_difference([*whole, less[1]])
    assert found is not None and found.where == "train.py:5" and (found.kind, found.ranks) == ("skipped", (1,))


def test_a_rank_that_ended_after_fewer_steps() -> None:
    """Its data had a batch less; the line is the one at which the others are."""
    usual = [replace(one, group=(0, 1)) for one in USUAL]
    more, less = recordings([steps(usual, 5), steps(usual, 4)])
    found = first_difference([more, replace(less, exit=99.0)])
    assert found is not None and (found.kind, *found.ranks, found.sure, found.where) == ("ended", 1, True, "train.py:5")
    assert found.text.startswith("rank 1 ended after 4 steps, and rank 0 made all_reduce of 100 B")


def test_a_micro_batch_less_in_a_pipeline() -> None:
    def stage(rank: int, micro: int) -> list[Call]:
        message = {"group": (0, 1), "comm": "pp"}
        if rank == 0:
            pattern = [call(5, 8, op="send", peer=1, **message)] * micro
            return pattern + [call(6, 8, op="recv", peer=1, **message)] * micro
        pattern = [call(15, 8, op="recv", peer=0, **message)] * micro
        return pattern + [call(16, 8, op="send", peer=0, **message)] * micro

    usual = [[one for step in range(3) for one in steps(stage(rank, 4), 1)] for rank in (0, 1)]
    programs = [[replace(one, step=at // 8) for at, one in enumerate(calls)] for calls in usual]
    assert first_difference(recordings(programs, marks=3)) is None
    short = [replace(one, step=1) for one in stage(0, 3)]
    waits = [*programs[0][:8], *short[:3], replace(short[3], state="started")]
    other = [*programs[1][:11], replace(programs[1][11], state="started")]
    found = first_difference(recordings([waits, other], marks=1))
    assert found is not None and found.sure and found.ranks == (0,) and "send" in found.text


def test_the_late_rank_is_the_one_that_others_wait_for() -> None:
    whole = recordings([steps(USUAL)] * 4)
    late = replace(whole[2], calls=tuple(replace(one, begin=(one.begin or 0) + 0.5) for one in whole[2].calls))
    first, *others = late_ranks([*whole[:2], late, whole[3]])
    assert first.rank == 2 and first.calls == 12 and first.seconds == pytest.approx(6.0) and not others
