"""The verifier finds what is wrong: mutants of every kind, each with rank, chunk and round; and nothing else."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from collective_reference import is_right, step_by_step

from harness.play import play
from harness.rounds import with_rounds
from harness.today import EVERYTHING, seed
from shardwise.schedule import CommSchedule, RepeatedRounds, Round, algorithms, build
from shardwise.schedule.program import lower
from shardwise.schedule.verify import verify

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
    """The round with some fields of one row replaced."""
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
    """A hand-made schedule on buffers of one chunk."""
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
