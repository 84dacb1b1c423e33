"""`Program`: a collective's schedule as each rank's list of actions with dependencies.

A rank starts its actions in the order of its list, each when those in `after` are complete. A send or a receive is then
posted and completes on its own; copies and additions occupy the rank, one at a time. Sends and receives between two
ranks meet in the order in which they were posted, as messages of MPI, NCCL and gloo do.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwise.schedule.comm import CommSchedule, Round, Span

Kind = Literal["send", "recv", "copy", "reduce"]


class Instruction(NamedTuple):
    """One instruction of a rank.

    kind: "send" and "recv" with `peer`; "copy" and "reduce" (add) in the rank's own memory.
    spans: what is sent, or written to, end to end. source: what is copied or added, span by span.
    after: indices of earlier actions of this rank that must be complete before this one starts.
    label: its round, for people: "round 3".
    """

    kind: Kind
    peer: int = -1
    spans: tuple[Span, ...] = ()
    source: tuple[Span, ...] = ()
    after: tuple[int, ...] = ()
    label: str = ""

    @property
    def elements(self) -> int:
        """Elements sent, received or written."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True)
class Program:
    """The actions of every rank, and the elements of memory that each needs."""

    actions: tuple[tuple[Instruction, ...], ...]
    elements: int

    @property
    def ranks(self) -> int:
        return len(self.actions)


def lower(schedule: CommSchedule, elements: int, rank: int | None = None) -> Program:
    """The program of a schedule on buffers of `elements` elements: of all ranks, or of one (other lists are empty).

    In every round a rank posts its receives, then its sends, waits for both, and adds. What is to be added arrives in
    staging memory behind the schedule's own (from `bounds(elements)[-1]` on), so that what is sent is what the round
    began with. Empty pieces are left out on both sides.
    """
    writer = _Writer(schedule, elements)
    for number, round in enumerate(schedule.rounds()):
        mine = round if rank is None else round.take((round.src == rank) | (round.dst == rank))
        writer.write(mine, f"round {number}", rank)
    return Program(tuple(map(tuple, writer.actions)), writer.staging + writer.most_staged)


class _Writer:
    """Round after round, the actions of each rank. `fences` are a rank's actions that the next round waits for."""

    def __init__(self, schedule: CommSchedule, elements: int) -> None:
        self.bounds = schedule.bounds(elements).tolist()
        self.staging = self.bounds[-1]
        self.most_staged = 0
        self.actions: list[list[Instruction]] = [[] for _ in range(schedule.ranks)]
        self.fences: list[tuple[int, ...]] = [()] * schedule.ranks

    def write(self, round: Round, label: str, only: int | None) -> None:
        sent: dict[tuple[int, int], list[Span]] = defaultdict(list)
        landing: dict[tuple[int, int], list[Span]] = defaultdict(list)
        copies: dict[int, list[tuple[Span, Span]]] = defaultdict(list)
        additions: dict[int, list[tuple[Span, Span]]] = defaultdict(list)
        staged: dict[int, int] = defaultdict(lambda: self.staging)
        for src, dst, read, write, adds in round.spans(self.bounds):
            if src == dst:
                (additions if adds else copies)[dst].append((write, read))
                continue
            lands = write
            if adds:
                lands = staged[dst], staged[dst] + read[1] - read[0]
                staged[dst] = lands[1]
                additions[dst].append((write, lands))
            sent[src, dst].append(read)
            landing[src, dst].append(lands)
        self.most_staged = max([self.most_staged, *(end - self.staging for end in staged.values())])
        posts: dict[int, list[Instruction]] = defaultdict(list)
        # Nearest peers first, so that ranks with several peers do not all begin with the same one.
        pairs = sorted(sent, key=lambda pair: (pair[1] - pair[0]) % len(self.actions))
        for src, dst in pairs:
            posts[dst].append(Instruction("recv", src, tuple(landing[src, dst]), (), self.fences[dst], label=label))
        for src, dst in pairs:
            posts[src].append(Instruction("send", dst, tuple(sent[src, dst]), (), self.fences[src], label=label))
        for rank, own in copies.items():
            posts[rank] += [Instruction("copy", -1, (to,), (at,), self.fences[rank], label=label) for to, at in own]
        for rank in posts.keys() | additions.keys():
            if only is None or rank == only:
                self._append(rank, posts[rank], additions[rank], label)

    def _append(self, rank: int, posts: list[Instruction], additions: list[tuple[Span, Span]], label: str) -> None:
        mine = self.actions[rank]
        after = tuple(range(len(mine), len(mine) + len(posts))) or self.fences[rank]
        mine += posts
        first = len(mine)
        mine += [Instruction("reduce", -1, (to,), (at,), after, label=label) for to, at in additions]
        self.fences[rank] = tuple(range(first, len(mine))) if additions else after
