"""Proving a schedule right by running it over other values than numbers.

- Random 64-bit integers, added with wraparound: the results are right only if each contribution arrived exactly once in
  the right place (a mistake passes with a chance of about 2**-64).
- A hash that is commutative but not associative in place of the sum: equal on all ranks only if all of them associated
  equally, and then floating-point replicas are equal to the bit.
- Whether a chunk holds anything yet when it is sent.
- Ranges and races: nothing outside a region, no chunk written twice or sent while it is overwritten in one round.

Chunks are the atoms, so what holds here holds for every size of buffer. A round cannot deadlock: both ends of a
transfer are in it, and a rank posts its receives before its sends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shardwise.data.sampler import splitmix64
from shardwise.schedule.comm import SUM, CommSchedule, Ints, Round, inputs, wanted
from shardwise.schedule.show import CollectiveDefect, explain

_Words = NDArray[np.uint64]
_SEED = 20080605


def verify(schedule: CommSchedule) -> list[CollectiveDefect]:
    """Errors of a schedule, causes first; an empty list when it is right for every size."""
    found: list[CollectiveDefect] = []
    for number, round in enumerate(schedule.rounds()):
        if misfits := _misfits(schedule, number, round):
            return misfits
        found += _races(schedule, number, round)
    values = _Values(schedule)
    for round in schedule.rounds():
        values.apply(round)
    if not values.right():
        found += explain(schedule)
    elif (differing := values.differing_replica()) is not None:
        rank, chunk = differing
        cell = rank * schedule.width + chunk
        last = max(n for n, round in enumerate(schedule.rounds()) if (round.cells(schedule.width)[1] == cell).any())
        text = (
            f"rank {rank}, {schedule.place(chunk)} (last written in round {last}): summed in another order than others"
        )
        found.append(CollectiveDefect(text, rank, chunk, last))
    return found


def _misfits(schedule: CommSchedule, number: int, round: Round) -> list[CollectiveDefect]:
    """Rows that name a rank or a chunk that there is not, or that run from one region into the next."""
    p, c = schedule.ranks, schedule.chunks
    ends = ((round.src, round.chunk, "sends"), (round.dst, round.to, "receives"))
    found = []
    for ranks, chunks, verb in ends:
        last = chunks + (round.count - 1) * round.stride
        bad = (ranks < 0) | (ranks >= p) | (chunks < 0) | (last >= schedule.width) | (chunks // c != last // c)
        for row in np.nonzero(bad)[0].tolist():
            rank, chunk = int(ranks[row]), int(chunks[row])
            text = (
                f"round {number}, rank {rank} {verb} chunks {chunk} to {int(last[row])}: ranks are 0 to {p - 1}, "
                f"chunks 0 to {schedule.width - 1} in regions of {c}"
            )
            found.append(CollectiveDefect(text, rank, chunk, number))
    return found


def _races(schedule: CommSchedule, number: int, round: Round) -> list[CollectiveDefect]:
    """Chunks whose content depends on who comes first.

    What is added is staged, and added when all sends of the round are complete, unless ranks read each other's memory.
    What a rank adds within its own memory is not staged: it is read among the round's additions.
    """
    width = schedule.width
    source, target, adds = round.cells(width)
    written = np.zeros((2, schedule.ranks * width), dtype=bool)
    written[0, target if schedule.reads else target[~adds]] = True
    written[1, target] = True
    late = np.repeat((round.src == round.dst) & round.reduce, round.count).astype(np.int64)
    clashes = [(cell, "is read while it is overwritten") for cell in np.unique(source[written[late, source]]).tolist()]
    if len(target) and np.bincount(target, minlength=1).max() > 1:
        order = np.argsort(target, kind="stable")
        again = order[1:][target[order][1:] == target[order][:-1]]
        cells = np.unique(target[again[~adds[again]]])
        clashes += [(cell, "is written twice") for cell in cells.tolist()]
    found = []
    for cell, what in clashes:
        rank, chunk = divmod(cell, width)
        found.append(
            CollectiveDefect(f"round {number}, rank {rank}, {schedule.place(chunk)} {what}", rank, chunk, number)
        )
    return found


class _Values:
    """The memory of all ranks over three algebras at once: integers, hashes, and whether anything is there."""

    def __init__(self, schedule: CommSchedule) -> None:
        self.schedule = schedule
        generator = np.random.default_rng(_SEED)
        shape = (schedule.ranks, schedule.width)
        start = generator.integers(0, 2**64, shape, dtype=np.uint64)
        self.given = start[:, : schedule.chunks].copy()
        there = np.zeros(shape, dtype=bool)
        there[:, : schedule.chunks] = inputs(schedule)
        self.there = there.ravel()
        self.words = np.stack([start.ravel(), start.ravel()])
        self.sent_nothing = False

    def apply(self, round: Round) -> None:
        source, target, adds = round.cells(self.schedule.width)
        moved, there = self.words[:, source], self.there[source]
        self.sent_nothing |= not there.all()
        for rows in _waves(target):
            self._write(target[rows], moved[:, rows], there[rows], adds[rows])

    def _write(self, target: Ints, moved: _Words, there: NDArray[np.bool_], adds: NDArray[np.bool_]) -> None:
        if adds.any():
            before = self.words[:, target]
            sums = before + moved
            # A bijection that scrambles: of a sum it is commutative and not associative.
            sums[1] = splitmix64(sums[1])
            moved = np.where(adds, sums, moved)
            there = np.where(adds, there & self.there[target], there)
        self.words[:, target] = moved
        self.there[target] = there

    def right(self) -> bool:
        """Whether all results are what the collective promises, and nothing was sent before it was there."""
        goal = wanted(self.schedule)
        expected = np.where(
            goal.of_rank == SUM,
            self.given.sum(axis=0, dtype=np.uint64)[goal.of_chunk],
            self.given[goal.of_rank, goal.of_chunk],
        )
        return not self.sent_nothing and bool((self.words[0, self._cells()] == expected).all())

    def differing_replica(self) -> tuple[int, int] | None:
        """(rank, chunk) of a sum whose hash is not that of the first rank that has it."""
        goal, hashes = wanted(self.schedule), self.words[1, self._cells()]
        _, first, group = np.unique(goal.of_chunk, return_index=True, return_inverse=True)
        differ = (hashes != hashes[first[group]]) & (goal.of_rank == SUM)
        if not differ.any():
            return None
        row = int(np.argmax(differ))
        return int(goal.rank[row]), int(goal.chunk[row])

    def _cells(self) -> Ints:
        goal = wanted(self.schedule)
        return goal.rank * self.schedule.width + goal.chunk


def _waves(target: Ints) -> Iterator[Ints | slice]:
    if len(target) < 2 or np.bincount(target).max() == 1:
        yield slice(None)
        return
    order = np.argsort(target, kind="stable")
    firsts = np.append(True, target[order][1:] != target[order][:-1])
    place = np.arange(len(target)) - np.maximum.accumulate(np.where(firsts, np.arange(len(target)), 0))
    for wave in range(int(place.max()) + 1):
        yield order[place == wave]
