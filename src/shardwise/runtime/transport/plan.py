"""Work of one rank in each round of a schedule when ranks read each other's memory.

A message of the schedule becomes a read by its receiver: it takes the chunks from where they lie in the sender's memory
and copies or adds them into its own. Two things make that safe, and both are settled here, once for each schedule,
size and rank: a rank reads a peer's memory of a round only when the peer has come to that round, and writes over what
a peer reads only when the peer has read it. Where a rank must write in the very round in which it is read, what comes
is first put aside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.report.exposure import union
from shardwise.schedule.comm import CommSchedule, Span


class Transfer(NamedTuple):
    """Elements `source` of rank `peer`'s memory are copied to, or added to (`reduce`), `target` of the own memory.

    aside: where they are put first, elements of a buffer of its own; None when they go straight to the target.
    """

    peer: int
    source: Span
    target: Span
    reduce: bool
    aside: Span | None = None


class Fence(NamedTuple):
    """Rank `peer` must have read what it reads of this rank in round `round`."""

    peer: int
    round: int


class RankRound(NamedTuple):
    """One round of one rank: wait for `before`, make the transfers, say that all is read, wait for `between`, and then
    bring what was put aside to its place. number: the round's in the schedule."""

    number: int
    before: tuple[Fence, ...]
    transfers: tuple[Transfer, ...]
    between: tuple[Fence, ...]


@dataclass(frozen=True)
class RankPlan:
    """The rounds in which one rank reads or is read.

    elements: of its memory. read: what peers read, and in which round. after: the fences until which its memory must
    not be changed by whoever owns it. aside: elements of the buffer for what is put aside.
    """

    rank: int
    elements: int
    steps: tuple[RankRound, ...]
    read: tuple[tuple[int, Span], ...]
    after: tuple[Fence, ...]
    aside: int

    @cached_property
    def sent(self) -> int:
        """Elements that peers read of this rank."""
        return sum(stop - start for _, (start, stop) in self.read)

    @cached_property
    def rounds(self) -> int:
        reads = {step.number for step in self.steps if any(transfer.peer != self.rank for transfer in step.transfers)}
        return len(reads | {number for number, _ in self.read})

    @cached_property
    def copy_plan(self) -> CopyPlan:
        """Place of each part of the memory, when the memory itself is out of the peers' sight."""
        return _copy_plan(self)

    @cached_property
    def in_sight(self) -> CopyPlan:
        """Place of each part when the peers see the memory itself, or all of it must be shown to them."""
        always = tuple(tuple(Places(True, True, True) for _ in step.transfers) for step in self.steps)
        everything = ((0, self.elements),)
        return CopyPlan(always, everything, everything, everything[0])


class Places(NamedTuple):
    """Whether one transfer finds the own source, finds the target's old value and leaves the new one in sight."""

    source: bool
    old: bool
    new: bool


class CopyPlan(NamedTuple):
    """Parts of a rank's memory that its peers can read, by round, with the fewest copies.

    places: of each transfer of each step. enter: what is brought into sight before. leave: what is brought back in the
    end. span: what encloses all that is ever in sight.
    """

    places: tuple[tuple[Places, ...], ...]
    enter: tuple[Span, ...]
    leave: tuple[Span, ...]
    span: Span


def _copy_plan(plan: RankPlan) -> CopyPlan:
    """A part of the memory is in sight from the start when a peer reads it before it is written, and what is written
    stays in sight while a peer is still to read it. A schedule that cuts the memory differently from transfer to
    transfer has all of it in sight."""
    transfers = [transfer for step in plan.steps for transfer in step.transfers]
    spans = [span for _, span in plan.read] + [transfer.target for transfer in transfers]
    spans += [transfer.source for transfer in transfers if transfer.peer == plan.rank]
    cut = sorted({edge for span in spans for edge in span})
    index = {edge: i for i, edge in enumerate(cut)}
    never = 1 << 60
    first_read, last_read = [never] * len(cut), [-1] * len(cut)
    for number, (start, stop) in plan.read:
        for cell in range(index[start], index[stop]):
            first_read[cell], last_read[cell] = min(first_read[cell], number), max(last_read[cell], number)
    first_write = [never] * len(cut)
    for step in reversed(plan.steps):
        for transfer in step.transfers:
            for cell in range(index[transfer.target[0]], index[transfer.target[1]]):
                first_write[cell] = step.number
    shown = [read <= write and read < never for read, write in zip(first_read, first_write, strict=True)]
    enter = [cell for cell, now in enumerate(shown) if now]
    written: set[int] = set()
    places: list[tuple[Places, ...]] = []
    for step in plan.steps:
        row: list[Places] = []
        for transfer in step.transfers:
            target = range(index[transfer.target[0]], index[transfer.target[1]])
            source = (
                range(index[transfer.source[0]], index[transfer.source[1]]) if transfer.peer == plan.rank else range(0)
            )
            old, new, own = ({shown[c] for c in target}, {last_read[c] > step.number for c in target},
                             {shown[c] for c in source})  # fmt: skip
            if len(old) > 1 or len(new) > 1 or len(own) > 1:
                return plan.in_sight
            row.append(Places(own == {True}, old == {True}, new == {True}))
            written |= set(target)
            for cell in target:
                shown[cell] = new == {True}
        places.append(tuple(row))
    cells = [(cut[i], cut[i + 1]) for i in range(len(cut) - 1)]
    seen = [cells[cell] for cell in range(len(cells)) if last_read[cell] >= 0]
    return CopyPlan(
        tuple(places),
        tuple(union(cells[cell] for cell in enter)),
        tuple(union(cells[cell] for cell in written if shown[cell])),
        (seen[0][0], seen[-1][1]) if seen else (0, 0),
    )


def rank_plan(schedule: CommSchedule, elements: int, rank: int) -> RankPlan:
    """The plan of `rank` on a memory of `schedule.bounds(elements)[-1]` elements."""
    bounds = schedule.bounds(elements).tolist()
    readers = _Readers()
    steps: list[RankRound] = []
    aside = 0
    read: list[tuple[int, Span]] = []
    for number, round in enumerate(schedule.rounds()):
        rows = round.take((round.src == rank) | (round.dst == rank)).spans(bounds)
        reads = [(src, at, to, adds) for src, dst, at, to, adds in rows if dst == rank]
        for src, dst, at, _, _ in rows:
            if src == rank and dst != rank:
                readers.add(Fence(dst, number), at)
                read.append((number, at))
        if not reads:
            if any(src == rank for src, *_ in rows):
                steps.append(RankRound(number, (), (), ()))
            continue
        before: set[Fence] = set()
        between: set[Fence] = set()
        transfers: list[Transfer] = []
        at_aside = 0
        for place, (src, at, to, adds) in enumerate(reads):
            fences = readers.of(to)
            # A row of the own memory reads what was there before the round, whatever came before it.
            again = any(other == rank and overlap(span, to) for other, span, _, _ in reads[place + 1 :])
            now = {fence for fence in fences if fence.round == number}
            before |= fences - now
            if now or again:
                between |= now
                length = to[1] - to[0]
                transfers.append(Transfer(src, at, to, adds, (at_aside, at_aside + length)))
                at_aside += length
            else:
                transfers.append(Transfer(src, at, to, adds))
        aside = max(aside, at_aside)
        transfers = _in_order(transfers, at_aside)
        aside = max(aside, sum(transfer.aside[1] - transfer.aside[0] for transfer in transfers if transfer.aside))
        readers.passed(before | between)
        steps.append(RankRound(number, tuple(sorted(before)), tuple(transfers), tuple(sorted(between))))
    return RankPlan(rank, bounds[-1], tuple(steps), tuple(read), tuple(sorted(readers.all())), aside)


def overlap(a: Span, b: Span) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _in_order(transfers: list[Transfer], end: int) -> list[Transfer]:
    """Put aside, too, whatever follows into a target of something put aside: rows are applied in their order."""
    later: list[Span] = []
    result: list[Transfer] = []
    for transfer in transfers:
        if transfer.aside is None and any(overlap(transfer.target, span) for span in later):
            length = transfer.target[1] - transfer.target[0]
            transfer, end = transfer._replace(aside=(end, end + length)), end + length
        if transfer.aside is not None:
            later.append(transfer.target)
        result.append(transfer)
    return result


class _Readers:
    """Readers of this rank's memory, until they are known to be done."""

    def __init__(self) -> None:
        self._spans: dict[Fence, list[Span]] = defaultdict(list)

    def add(self, fence: Fence, span: Span) -> None:
        self._spans[fence].append(span)

    def of(self, target: Span) -> set[Fence]:
        return {fence for fence, spans in self._spans.items() if any(overlap(span, target) for span in spans)}

    def passed(self, fences: set[Fence]) -> None:
        """These have been waited for, and with them all earlier rounds of the same readers."""
        latest = _latest(fences)
        self._spans = defaultdict(
            list, {f: spans for f, spans in self._spans.items() if f.round > latest.get(f.peer, -1)}
        )

    def all(self) -> set[Fence]:
        """The last round of each reader that is not known to be over."""
        return {Fence(peer, round) for peer, round in _latest(self._spans).items()}


def _latest(fences: Iterable[Fence]) -> dict[int, int]:
    """Peer -> the last round of its fences."""
    return dict(sorted(fences))
