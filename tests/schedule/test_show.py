"""What people and pages are shown of a schedule."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from collective_reference import is_right, results, step_by_step
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from harness.play import play
from harness.rounds import with_rounds
from harness.today import EVERYTHING, seed
from shardwise.errors import UserError
from shardwise.schedule import Algorithm, CommSchedule, RepeatedRounds, Round, algorithms, build, collective_name, find
from shardwise.schedule.algorithms.patterns import two_colours, two_trees
from shardwise.schedule.sending import lower
from shardwise.schedule.show import MOST_FRAMED, describe, frames
from shardwise.schedule.verify import verify


def test_a_ring_reads_like_one():
    lines = list(describe(build("all-reduce", "ring", 4), 10))
    assert lines[0] == "all-reduce ring: 4 ranks, 6 rounds; 10 elements in 4 chunks of 2 or 3; memory: data"
    start = lines.index("round 0: reduce-scatter")
    assert lines[start + 1] == "  rank 0 → rank 1: add chunk 3 (3 elements)"
    table = [line.split() for line in lines[start + 5 : start + 10]]
    assert table[0] == ["0", "1", "2", "3"] and table[2] == ["rank", "1", "1", "1", "1", "0-1"]
    assert [line.split()[2:] for line in lines[-6:-2]] == [["0-3"] * 4] * 4


def test_other_memory_and_spans_are_named():
    text = "\n".join(describe(build("all-to-all", "bruck", 4), 4))
    assert "rank 0, by itself: copy chunk 0 to chunk 0 of out (1 element)" in text
    assert "rank 0 → rank 1: copy chunk 3 to chunk 3 of scratch (1 element)" in text
    assert "chunks 0,2" in "\n".join(describe(build("all-gather", "hierarchical", 4, node=2), 4))
    assert "holds" not in "\n".join(describe(build("all-reduce", "ring", 9), 9))


@pytest.mark.parametrize("algorithm", algorithms(), ids=lambda a: f"{a.collective}-{a.name}")
def test_frames_tell_what_every_chunk_holds(algorithm):
    """A page needs nothing else: the states are those of the transfers, done step by step by somebody else."""
    schedule = build(algorithm.collective, algorithm.name, 6)
    data = json.loads(json.dumps(frames(schedule, 20)))
    assert len(data["frames"]) == schedule.steps + 1 and data["frames"][0]["transfers"] == []
    rounds = list(schedule.rounds())
    for done, frame in enumerate(data["frames"]):
        memory = step_by_step(schedule, rounds[:done])
        for rank, row in enumerate(frame["holds"]):
            expected = [None if held is None else sorted([*part] for part in held.elements()) for held in memory[rank]]
            assert row == expected
    sent = sum(t["elements"] for frame in data["frames"] for t in frame["transfers"] if t["src"] != t["dst"])
    assert (sent > 0) and data["bounds"][-1] == schedule.data_elements(20) * len(schedule.regions)


def test_the_guide_s_example_runs():
    guide = Path(__file__).parents[2] / "docs" / "collectives.md"
    (example,) = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    exec(example, {})


def test_frames_of_many_ranks_leave_the_states_out():
    data = frames(build("all-reduce", "recursive-doubling", MOST_FRAMED + 1), 1)
    assert {frame["holds"] for frame in data["frames"]} == {None}


# -- Rounds, and where the chunks of a buffer begin


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


# -- The verifier finds what is wrong: mutants of every kind, each with rank, chunk and round; and nothing else


MUTANTS = 200
KINDS = ("drop", "double", "misroute", "swap", "offset")


def numbers_of_ranks() -> list[int]:
    """1 to 64 with SHARDWISE_ALL=1; else the small ones and three others that change with the date."""
    if EVERYTHING:
        return list(range(1, 65))
    return [*range(1, 10), *sorted(random.Random(seed()).sample(range(10, 65), 3))]


@pytest.mark.parametrize("algorithm", algorithms(), ids=lambda a: f"{a.collective}-{a.name}")
def test_every_algorithm_is_right(algorithm):
    for p in numbers_of_ranks():
        assert [str(found) for found in verify(build(algorithm.collective, algorithm.name, p))] == []


def changed(round: Round, row: int, **fields: int) -> Round:
    columns = {name: getattr(round, name).copy() for name in fields}
    for name, value in fields.items():
        columns[name][row] = value
    return replace(round, **columns)


def mutate(kind: str, schedule: CommSchedule, draw: random.Random) -> list[Round] | None:
    """The rounds with one mistake; None where this kind has no place in what was drawn."""
    rounds = list(schedule.rounds())
    at = draw.randrange(len(rounds))
    round = rounds[at]
    row = draw.randrange(len(round))
    if kind == "drop":
        rounds[at] = round.take(np.arange(len(round)) != row)
    elif kind == "double":
        rounds.insert(at + 1, round.take([row]))
    elif kind == "misroute":
        others = [r for r in range(schedule.ranks) if r not in (round.src[row], round.dst[row])]
        if not others:
            return None
        end = draw.choice(["src", "dst"])
        rounds[at] = changed(round, row, **{end: draw.choice(others)})
    elif kind == "swap":
        other = draw.randrange(len(round))
        first, second = int(round.dst[row]), int(round.dst[other])
        rounds[at] = changed(changed(round, row, dst=second), other, dst=first)
        if draw.random() < 0.3 and at + 1 < len(rounds):
            rounds = list(schedule.rounds())
            rounds[at], rounds[at + 1] = rounds[at + 1], rounds[at]
    else:
        end = draw.choice(["chunk", "to"])
        most = schedule.width - 1 - (int(round.count[row]) - 1) * int(round.stride[row])
        rounds[at] = changed(round, row, **{end: draw.randint(0, most)})
    return rounds


def mutants(count: int) -> Iterator[tuple[str, CommSchedule]]:
    """Mutants that give another result, kinds by turns.

    A mistake may change nothing: rounds that commute may be swapped, and a value may arrive by another way. So only
    those count whose result an interpreter that shares nothing with the verifier finds to be wrong.
    """
    draw, made = random.Random(seed()), 0
    while made < count:
        kind, algorithm, p = KINDS[made % len(KINDS)], draw.choice(algorithms()), draw.randint(2, 9)
        schedule = build(algorithm.collective, algorithm.name, p)
        rounds = mutate(kind, schedule, draw)
        if rounds is None or is_right(schedule, step_by_step(schedule, rounds)):
            continue
        made += 1
        yield f"{kind} in {schedule.name}, {p} ranks", with_rounds(schedule, rounds)


def test_mutants_are_found_with_rank_chunk_and_round():
    for name, mutant in mutants(MUTANTS):
        found = verify(mutant)
        assert found, name
        for finding in found:
            text = str(finding)
            assert 0 <= finding.rank < mutant.ranks and 0 <= finding.chunk < mutant.width, (name, text)
            assert 0 <= finding.round < mutant.steps, (name, text)
            assert f"rank {finding.rank}" in text and "chunk" in text and f"round {finding.round}" in text, (name, text)


def rounds_of(collective: str, p: int, *rounds: Round, **fields: object) -> CommSchedule:
    memory: dict = {"regions": ("data", "out"), **fields}
    return CommSchedule(collective, "by hand", p, 1, tuple(map(RepeatedRounds.once, rounds)), **memory)


def texts(schedule: CommSchedule) -> list[str]:
    return [str(found) for found in verify(schedule)]


@pytest.mark.parametrize("own_first", [True, False])
def test_replicas_that_associate_differently_are_found(own_first):
    """Each rank adds all buffers into another one: its own first and then the others', or all in rank order."""
    dst, src = np.divmod(np.arange(9), 3)
    order = np.argsort(3 * dst + (src != dst) * (1 + src), kind="stable") if own_first else np.arange(9)
    dst, src = dst[order], src[order]
    everything = Round.of(src, dst, 0, to=1, reduce=src != dst if own_first else src > 0)
    found = texts(rounds_of("all-reduce", 3, everything, result="out"))
    # Rank 1 adds (1 + 0) + 2, which is (0 + 1) + 2; rank 2 adds (2 + 0) + 1.
    where = "rank 2, chunk 0 of out (last written in round 0)"
    assert found == ([f"{where}: summed in another order than others"] if own_first else [])


def test_what_is_missing_doubled_or_too_early_is_named():
    assert texts(rounds_of("all-reduce", 2, Round.of(0, 1, 0, reduce=True))) == [
        "rank 0, chunk 0 (never written up to round 0): misses rank 1's chunk 0"
    ]
    twice = rounds_of("reduce", 2, Round.of(1, 0, 0, reduce=True), Round.of(1, 0, 0, reduce=True))
    assert texts(twice) == [
        "round 1, rank 1 → rank 0, chunk 0: adds rank 1's chunk 0 a second time",
        "rank 0, chunk 0 (last written in round 1): has too much: rank 1's chunk 0",
    ]
    early = rounds_of("broadcast", 3, Round.of(1, 2, 0), Round.of(0, 1, 0))
    assert texts(early)[0] == "round 0, rank 1 → rank 2, chunk 0: rank 1 does not hold it yet"


def test_races_are_found():
    passed_on = rounds_of("broadcast", 3, Round.of([0, 1], [1, 2], 0), Round.of(0, 2, 0))
    assert "round 0, rank 1, chunk 0 is read while it is overwritten" in texts(passed_on)
    both = rounds_of("broadcast", 3, Round.of(0, [1, 2, 2], 0))
    assert texts(both) == ["round 0, rank 2, chunk 0 is written twice"]


def test_an_addition_within_a_rank_of_what_arrives_to_be_added_is_a_race():
    """Rank 0 adds its own data to rank 1's, as the round found it, while rank 1's data is added to its own."""
    both = Round.join(Round.of(1, 0, 0, reduce=True), Round.of(0, 0, 0, to=1, reduce=True))
    schedule = rounds_of("reduce", 2, Round.of(1, 0, 0, to=1), both, result="out")
    program = lower(schedule, 1)
    memory = [np.array([start, *[0] * (program.elements - 1)]) for start in (10, 1)]
    play(program, memory=memory)
    assert memory[0][1] != 11
    assert texts(schedule) == ["round 1, rank 0, chunk 0 is read while it is overwritten"]


def test_adding_to_what_peers_read_is_a_race_only_without_messages():
    swap = rounds_of("all-reduce", 2, Round.of([0, 1], [1, 0], 0, reduce=True))
    assert texts(swap) == []
    assert texts(replace(swap, reads=True)) == [
        "round 0, rank 0, chunk 0 is read while it is overwritten",
        "round 0, rank 1, chunk 0 is read while it is overwritten",
    ]


def test_ranks_and_chunks_that_do_not_exist_are_found():
    schedule = rounds_of("broadcast", 2, Round.of(0, 1, 0))
    assert texts(schedule) == []
    for round in (Round.of(0, 2, 0), Round.of(0, 1, 2), Round.of(0, 1, 0, count=2), Round.of(0, 1, -1)):
        (found,) = {text.split(":")[0] for text in texts(with_rounds(schedule, [round]))[:1]}
        assert found.startswith("round 0, rank ")


# -- Every algorithm gives what its collective promises, for any number of ranks and any size; how it is asked for


@st.composite
def cases(draw: st.DrawFn) -> tuple[Algorithm, int, dict[str, int], int]:
    """(algorithm, ranks, options, elements): sizes that divide, that do not, and below the number of ranks."""
    found, p = draw(st.sampled_from(algorithms())), draw(st.integers(1, 20))
    options = {}
    if "root" in found.options:
        options["root"] = draw(st.integers(0, p - 1))
    if "segments" in found.options:
        options["segments"] = draw(st.integers(1, 9))
    if "node" in found.options:
        options["node"] = draw(st.sampled_from([g for g in range(1, p + 1) if p % g == 0]))
    return found, p, options, draw(st.one_of(st.integers(0, 50), st.integers(1, 5).map(lambda k: k * p)))


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_the_program_gives_the_collective_s_result(case, seed):
    """Element by element, through the lowered program, against sums of whole arrays."""
    found, p, options, n = case
    schedule = build(found.collective, found.name, p, **options)
    program = lower(schedule, n)
    generator, elements = np.random.default_rng(seed), schedule.data_elements(n)
    memory = list(generator.integers(-(2**63), 2**63 - 1, (p, program.elements)))
    data = np.stack(memory)[:, :elements]
    with np.errstate(over="ignore"):
        played = play(program, memory=memory)
    assert not played.stuck and not played.problems
    bounds = schedule.bounds(n)
    start = int(bounds[schedule.region(schedule.result)])
    for rank, (offset, right) in results(found.collective, data, bounds, schedule.root).items():
        at = start + offset
        np.testing.assert_array_equal(memory[rank][at : at + len(right)], right)


@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_one_rank_s_program_is_its_part_of_all(case, data):
    found, p, options, n = case
    schedule = build(found.collective, found.name, p, **options)
    rank = data.draw(st.integers(0, p - 1))
    alone, together = lower(schedule, n, rank), lower(schedule, n)
    assert alone.actions[rank] == together.actions[rank]
    assert not any(actions for other, actions in enumerate(alone.actions) if other != rank)
    assert alone.elements <= together.elements


def test_schedules_of_many_ranks_are_small():
    """Rounds are made when asked for: what is kept for 16,384 ranks is a stage or two, or one for each level."""
    for name, most in (("ring", 2), ("hierarchical", 4), ("rabenseifner", 28), ("recursive-doubling", 14)):
        schedule = build("all-reduce", name, 16384)
        assert len(schedule.stages) <= most
        assert all(len(stage.make(0)) <= 16384 for stage in schedule.stages)


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8, 16, 21, 64])
def test_in_two_trees_no_rank_has_two_children_in_both(p):
    trees = two_trees(p)
    for src, dst in trees:
        assert sorted(dst.tolist()) == sorted(set(range(p)) - {int(src[0])})
        assert np.bincount(src, minlength=p).max() <= 2
    src, dst = (np.concatenate(ends) for ends in zip(*trees, strict=True))
    assert np.bincount(src).max() <= 2 and np.bincount(dst).max() <= 2
    colour = two_colours(src, dst)
    for ends in (src, dst):
        assert len({*zip(ends.tolist(), colour.tolist(), strict=True)}) == len(ends)


def test_names_are_forgiving():
    assert collective_name("all_gather_into") == "all-gather" == collective_name("all_gather_into_tensor")
    assert collective_name("all_to_all_single") == "all-to-all" and collective_name(" All-Reduce ") == "all-reduce"
    assert find("all_reduce", "butterfly").name == "recursive-doubling"


@from_table
def test_mistakes_are_told_in_one_line(collective, name, ranks, options, words):
    with pytest.raises(UserError, match=words) as caught:
        build(collective, name, ranks, **options)
    assert "\n" not in str(caught.value)
