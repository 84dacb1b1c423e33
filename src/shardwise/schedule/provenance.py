"""Contributions to every chunk, round by round: for people, and for naming errors.

A chunk's holding is the multiset of input chunks that were added up in it: a sorted tuple of (rank, chunk), or None
where nothing has arrived yet. Plain Python over single chunks: for small numbers of ranks, or for one that went wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.schedule.collectives import SUM, inputs, wanted
from shardwise.schedule.comm import CommSchedule, Round

Part = tuple[int, int]
Holding = tuple[Part, ...] | None

MOST = 10
"""Findings that `explain` gives at most: the first ones are the causes, what follows are their consequences."""


@dataclass(frozen=True)
class CollectiveDefect:
    """A defect of a schedule. rank, chunk: where it shows, counting chunks over the rank's whole memory; round: when it
    happened, or when the chunk was last written. text: one line that names all three."""

    text: str
    rank: int
    chunk: int
    round: int

    def __str__(self) -> str:
        return self.text


@dataclass
class Holdings:
    """The state after some rounds. held: rank -> chunk -> holding; written: rank -> chunk -> round that wrote it."""

    held: list[list[Holding]]
    written: list[dict[int, int]]

    @classmethod
    def initial(cls, schedule: CommSchedule) -> Holdings:
        """The inputs where the collective has them, nothing elsewhere."""
        there = inputs(schedule).tolist()
        held: list[list[Holding]] = [[None] * schedule.width for _ in range(schedule.ranks)]
        for rank, row in enumerate(there):
            held[rank][: schedule.chunks] = [((rank, chunk),) if given else None for chunk, given in enumerate(row)]
        return cls(held, [{} for _ in range(schedule.ranks)])

    def apply(self, schedule: CommSchedule, number: int, round: Round) -> list[CollectiveDefect]:
        """Do one round. Returns what is wrong with it: chunks sent that are not there, parts added twice."""
        found: list[CollectiveDefect] = []
        moves = [
            (src, dst, chunk + i, to + i, adds, self.held[src][chunk + i])
            for src, dst, chunk, to, count, stride, adds in round.rows()
            for i in range(0, count * stride, stride)
        ]
        for src, dst, chunk, to, adds, moved in moves:
            there = self.held[dst][to]
            what = f"round {number}, rank {src} → rank {dst}, {schedule.place(chunk)}"
            if moved is None:
                found.append(CollectiveDefect(f"{what}: rank {src} does not hold it yet", src, chunk, number))
            elif adds and there is None:
                found.append(
                    CollectiveDefect(f"{what}: added to {schedule.place(to)}, which is empty", dst, to, number)
                )
            elif adds and there and (twice := sorted(set(moved) & set(there))):
                found.append(CollectiveDefect(f"{what}: adds {_name(twice)} a second time", dst, to, number))
            if not adds:
                self.held[dst][to] = moved
            else:
                self.held[dst][to] = tuple(sorted((there or ()) + moved)) if moved is not None else None
            self.written[dst][to] = number
        return found


def history(schedule: CommSchedule) -> Iterator[list[list[Holding]]]:
    """Contributions in every chunk of every rank: before the first round, and after each."""
    state = Holdings.initial(schedule)
    yield [list(row) for row in state.held]
    for number, round in enumerate(schedule.rounds()):
        state.apply(schedule, number, round)
        yield [list(row) for row in state.held]


def explain(schedule: CommSchedule) -> list[CollectiveDefect]:
    """Errors of a schedule in terms of contributions: sent too early, added twice, missing in the end."""
    state, found, number = Holdings.initial(schedule), list[CollectiveDefect](), 0
    for number, round in enumerate(schedule.rounds()):
        found += state.apply(schedule, number, round)
    goal = wanted(schedule)
    for rank, chunk, of_rank, of_chunk in zip(
        *(column.tolist() for column in (goal.rank, goal.chunk, goal.of_rank, goal.of_chunk)), strict=True
    ):
        givers = range(schedule.ranks) if of_rank == SUM else [of_rank]
        want, have = Counter((giver, of_chunk) for giver in givers), Counter(state.held[rank][chunk] or ())
        if have == want:
            continue
        wrong = [(want - have, "misses"), (have - want, "has too much:")]
        last = state.written[rank].get(chunk)
        when = f"last written in round {last}" if last is not None else f"never written up to round {number}"
        saying = ", ".join(f"{verb} {_name(sorted(parts))}" for parts, verb in wrong if parts)
        text = f"rank {rank}, {schedule.place(chunk)} ({when}): {saying}"
        found.append(CollectiveDefect(text, rank, chunk, number if last is None else last))
    return found[:MOST]


def _name(parts: list[Part]) -> str:
    shown = [f"rank {rank}'s chunk {chunk}" for rank, chunk in parts[:3]]
    return ", ".join(shown) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")
