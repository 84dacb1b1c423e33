"""A schedule as people read it, and as frames that a page animates.

Both tell, after every round, whose data each chunk of each rank holds, as long as the ranks are few.

Contributions to every chunk, round by round: for people, and for naming errors.

A chunk's holding is the multiset of input chunks that were added up in it: a sorted tuple of (rank, chunk), or None
where nothing has arrived yet. Plain Python over single chunks: for small numbers of ranks, or for one that went wrong.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from shardwise.codec import keyed
from shardwise.report.units import format_spans
from shardwise.schedule.comm import SUM, CommSchedule, Round, inputs, wanted

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
    def initial(cls, schedule: CommSchedule) -> Self:
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


FRAMES_VERSION = 1
MOST_FRAMED = 32
"""Ranks up to which frames carry what every chunk holds."""
MOST_SHOWN = 8
"""Ranks, and chunks of memory, up to which `describe` prints what every chunk holds."""


def describe(schedule: CommSchedule, elements: int) -> Iterator[str]:
    """The lines of `shardwise collective show`: every round with its transfers, in chunks and elements."""
    yield _headline(schedule, elements)
    small = schedule.ranks <= MOST_SHOWN and schedule.width <= 2 * MOST_SHOWN
    states = history(schedule) if small else None
    if states:
        yield ""
        yield "at the start every chunk holds the data of"
        yield from _table(schedule, next(states))
    for number, (round, label) in enumerate(zip(schedule.rounds(), schedule.labels(), strict=True)):
        yield ""
        yield f"round {number}: {label}"
        yield from (f"  {line}" for line in _transfers(schedule, round, elements))
        if states:
            yield from _table(schedule, next(states))
    yield ""
    yield f"the result is in {schedule.result!r}" if len(schedule.regions) > 1 else "the result is where the data was"


def frames(schedule: CommSchedule, elements: int) -> dict[str, Any]:
    """The schedule as JSON for a page: one frame for the start, and one for each round with the state after it.

    bounds: where the chunks of a rank's memory begin, in elements. holds: rank -> chunk -> list of [rank, chunk], the
    inputs that were added up there, or null for nothing yet; null as a whole above `MOST_FRAMED` ranks.
    """
    states = history(schedule) if schedule.ranks <= MOST_FRAMED else None
    bounds = schedule.bounds(elements)
    found: list[dict[str, Any]] = [{"round": None, "stage": "start", "transfers": [], "holds": _holds(states)}]
    for number, (round, label) in enumerate(zip(schedule.rounds(), schedule.labels(), strict=True)):
        transfers = [
            {
                "src": src,
                "dst": dst,
                "chunks": list(range(chunk, chunk + count * stride, stride)),
                "to": list(range(to, to + count * stride, stride)),
                "op": "add" if adds else "copy",
                "elements": int(np.diff(bounds)[chunk : chunk + count * stride : stride].sum()),
            }
            for src, dst, chunk, to, count, stride, adds in round.rows()
        ]
        found.append({"round": number, "stage": label, "transfers": transfers, "holds": _holds(states)})
    return {
        "frames_version": FRAMES_VERSION,
        **keyed(schedule, "collective algorithm"),
        "options": dict(schedule.options),
        **keyed(schedule, "root ranks"),
        "elements": elements,
        **keyed(schedule, "chunks regions result"),
        "bounds": bounds.tolist(),
        "frames": found,
    }


def _holds(states: Iterator[list[list[Holding]]] | None) -> list[list[list[list[int]] | None]] | None:
    if states is None:
        return None
    return [[None if held is None else [list(part) for part in held] for held in row] for row in next(states)]


def _headline(schedule: CommSchedule, elements: int) -> str:
    sizes = np.diff(schedule.bounds(elements))[: schedule.chunks]
    least, most = int(sizes.min()), int(sizes.max())
    each = f"{most}" if least == most else f"{least} or {most}"
    options = "".join(f", {name} {value}" for name, value in schedule.options.items() if value)
    chunks = "1 chunk" if schedule.chunks == 1 else f"{schedule.chunks} chunks"
    rounds = "1 round" if schedule.steps == 1 else f"{schedule.steps} rounds"
    return (
        f"{schedule.name}{options}: {schedule.ranks} ranks, {rounds}; "
        f"{elements} elements in {chunks} of {each}; memory: {', '.join(schedule.regions)}"
    )


def _transfers(schedule: CommSchedule, round: Round, elements: int) -> Iterator[str]:
    bounds = schedule.bounds(elements)
    for src, dst, chunk, to, count, stride, adds in round.rows():
        chunks = tuple(range(chunk, chunk + count * stride, stride))
        size = int(sum(bounds[c + 1] - bounds[c] for c in chunks))
        where = "" if to == chunk else f" to {_place(schedule, tuple(range(to, to + count * stride, stride)))}"
        way = f"rank {src} → rank {dst}" if src != dst else f"rank {src}, by itself"
        unit = "element" if size == 1 else "elements"
        yield f"{way}: {'add' if adds else 'copy'} {_place(schedule, chunks)}{where} ({size} {unit})"


def _place(schedule: CommSchedule, chunks: tuple[int, ...]) -> str:
    region = chunks[0] // schedule.chunks
    within = tuple(chunk - region * schedule.chunks for chunk in chunks)
    name = f"chunk{'s' if len(within) > 1 else ''} {format_spans(within)}"
    return name if region == 0 else f"{name} of {schedule.regions[region]}"


def _table(schedule: CommSchedule, held: list[list[Holding]]) -> Iterator[str]:
    head = ["", *(_heading(schedule, chunk) for chunk in range(schedule.width))]
    rows = [head, *([f"rank {rank}", *map(_ranks, row)] for rank, row in enumerate(held))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _heading(schedule: CommSchedule, chunk: int) -> str:
    region, within = divmod(chunk, schedule.chunks)
    return str(within) if region == 0 else f"{schedule.regions[region]} {within}"


def _ranks(holding: Holding) -> str:
    return "·" if holding is None else format_spans(tuple(rank for rank, _ in holding))
