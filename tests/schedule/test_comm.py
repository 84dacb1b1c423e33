"""Rounds, and where the chunks of a buffer begin."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.schedule import CommSchedule, RepeatedRounds, Round, build


def rows(round: Round) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in round.columns), strict=True))


def test_rows_are_broadcast_and_clipped():
    round = Round.of([0, 1, 2], 3, [4, 5, 6], count=[2, 0, -1], reduce=True)
    assert rows(round) == [(0, 3, 4, 4, 2, 1, True)]
    assert rows(Round.join(round, Round.of(1, 0, 0, to=7))) == [(0, 3, 4, 4, 2, 1, True), (1, 0, 0, 7, 1, 1, False)]


def test_rows_are_taken_by_index_or_by_mask_and_may_be_none():
    round = Round.of([0, 1, 2], 3, 4)
    assert round.take([2, 0]).src.tolist() == [2, 0] and round.take(round.src > 1).src.tolist() == [2]
    empty = round.take([])
    assert len(empty) == len(round.take(round.src > 2)) == len(empty.take(empty.src > 1)) == 0


chunks = st.integers(0, 20)
many_rows = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), chunks, chunks, st.integers(1, 4)), min_size=1)


@given(many_rows, st.integers(1, 3))
def test_cells_are_the_chunks_one_by_one_whether_cut_or_not(drawn, stride):
    src, dst, chunk, to, count = (np.array(column) for column in zip(*drawn, strict=True))
    round = Round.of(src, dst, chunk, to=to, count=count, stride=stride, reduce=src > dst)
    listed = [(s * 50 + c + i * stride, d * 50 + t + i * stride, s > d) for s, d, c, t, n in drawn for i in range(n)]
    for same in (round, round.contiguous()):
        assert list(zip(*(column.tolist() for column in same.cells(50)), strict=True)) == listed
    assert stride == 1 or (round.contiguous().count == 1).all()


@given(st.integers(1, 40), st.integers(0, 200))
def test_bounds_cut_every_size_evenly(p, n):
    schedule = build("all-reduce", "ring", p)
    sizes = np.diff(schedule.bounds(n))
    assert sizes.sum() == n and sizes.max() - sizes.min() <= 1 and schedule.data_elements(n) == n


@given(st.integers(1, 40), st.integers(0, 200))
def test_all_to_all_has_equal_blocks(p, n):
    schedule = build("all-to-all", "bruck", p)
    sizes = np.diff(schedule.bounds(n))
    assert len(sizes) == 4 * p and set(sizes.tolist()) == {-(-n // p)}
    assert 0 <= schedule.data_elements(n) - n < p


def test_a_stage_makes_its_rounds_when_they_are_asked_for():
    made: list[int] = []

    def make(k: int) -> Round:
        made.append(k)
        return Round.of(0, 1, k)

    schedule = CommSchedule("broadcast", "by hand", 2, 9, (RepeatedRounds(make, 9, "all"),))
    assert schedule.steps == 9 and made == []
    assert [int(round.chunk[0]) for round in schedule.rounds()] == made == list(range(9))
    assert list(schedule.labels()) == ["all"] * 9


def test_chunks_have_names_by_region():
    schedule = build("all-to-all", "bruck", 3)
    assert [schedule.place(chunk) for chunk in (2, 3, 11)] == ["chunk 2", "chunk 0 of out", "chunk 2 of spare"]
    assert schedule.region("scratch") == 6 and schedule.width == 12
