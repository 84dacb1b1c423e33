"""Work of one rank to run a schedule by sends, compiled once for a size.

Torch-free, so that prediction counts the memory that the runtime allocates.

`Program`: a collective's schedule as each rank's list of actions with dependencies.

A rank starts its actions in the order of its list, each when those in `after` are complete. A send or a receive is then
posted and completes on its own; copies and additions occupy the rank, one at a time. Sends and receives between two
ranks meet in the order in which they were posted, as messages of MPI, NCCL and gloo do.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
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


Pairs = tuple[tuple[Span, Span], ...]
"""(to, from), one pair after the other."""

MOST_COMPILED = 64
"""Ranks up to which the room of each is looked at; of more ranks, the first, the middle and the last."""


@dataclass(frozen=True)
class Post:
    """Start messages: receives stand before the sends of their round.

    messages: (index of the action, "send" or "recv", peer, span). pack: copies (to, from) that come first.
    """

    messages: tuple[tuple[int, Literal["send", "recv"], int, Span], ...]
    pack: Pairs


@dataclass(frozen=True)
class Await:
    """Wait until the messages of these actions are complete; then put (to, from) in place what came packed."""

    actions: tuple[int, ...]
    unpack: Pairs


@dataclass(frozen=True)
class Local:
    """Copies, or additions, of (to, from) in the rank's own memory, in this order."""

    adds: bool
    pairs: Pairs


Step = Post | Await | Local


def compile_steps(actions: Sequence[Instruction], base: int, staged: int) -> tuple[list[Step], int]:
    """(what one rank does, elements of memory that it needs), from its actions in a `Program`.

    base: elements of the schedule's own memory. staged: elements in all that the program needs, with its staging.
    Behind them lies what is packed: messages that are not contiguous. A message is waited for only where something
    comes after it, and in the end.
    """
    compiler = _Compiler(base, staged)
    for index, action in enumerate(actions):
        compiler.add(index, action)
    compiler.wait(list(compiler.flying))
    return compiler.steps, compiler.most


class _Compiler:
    """flying: action under way -> the copies that follow its end. used: memory in use, packed messages included."""

    def __init__(self, base: int, staged: int) -> None:
        self.base, self.staged = base, staged
        self.used = self.most = staged
        self.steps: list[Step] = []
        self.flying: dict[int, Pairs] = {}

    def add(self, index: int, action: Instruction) -> None:
        self.wait([earlier for earlier in action.after if earlier in self.flying])
        if action.kind == "send" or action.kind == "recv":
            self.post(index, action.kind, action)
        elif action.kind in ("copy", "reduce"):
            adds = action.kind == "reduce"
            pairs = tuple(zip(action.spans, action.source, strict=True))
            last = self.steps[-1] if self.steps else None
            if isinstance(last, Local) and last.adds == adds:
                self.steps[-1] = Local(adds, (*last.pairs, *pairs))
            else:
                self.steps.append(Local(adds, pairs))

    def post(self, index: int, kind: Literal["send", "recv"], action: Instruction) -> None:
        spans = self.joined(action.spans)
        span, pairs = (spans[0], ()) if len(spans) == 1 else self.packed(spans)
        pack: Pairs = pairs if kind == "send" else ()
        self.flying[index] = tuple((to, at) for at, to in pairs) if kind == "recv" else ()
        message = index, kind, action.peer, span
        last = self.steps[-1] if self.steps else None
        if isinstance(last, Post):
            self.steps[-1] = Post((*last.messages, message), (*last.pack, *pack))
        else:
            self.steps.append(Post((message,), pack))

    def wait(self, actions: list[int]) -> None:
        if not actions:
            return
        copies = [copy for index in actions for copy in self.flying.pop(index)]
        self.steps.append(Await(tuple(actions), tuple(copies)))
        if not self.flying:
            self.used = self.staged

    def joined(self, spans: Sequence[Span]) -> list[Span]:
        """Spans that follow each other as one, unless one is in the memory and one in the staging behind it."""
        found: list[Span] = []
        for start, stop in spans:
            if found and found[-1][1] == start != self.base:
                found[-1] = found[-1][0], stop
            else:
                found.append((start, stop))
        return found

    def packed(self, spans: Sequence[Span]) -> tuple[Span, Pairs]:
        """A place for a message of several spans, and (part of it, span) for each."""
        first = at = self.used
        pairs = []
        for start, stop in spans:
            pairs.append(((at, at + stop - start), (start, stop)))
            at += stop - start
        self.used, self.most = at, max(self.most, at)
        return (first, at), tuple(pairs)


def room(schedule: CommSchedule, elements: int) -> int:
    """Elements of staging and packed messages that any rank needs beside its memory for `elements` elements, with all
    chunks as large as the largest."""
    return _room_in_chunks(schedule) * -(-elements // schedule.chunks)


@lru_cache(maxsize=256)
def _room_in_chunks(schedule: CommSchedule) -> int:
    p, base = schedule.ranks, int(schedule.bounds(schedule.chunks)[-1])
    most = 0
    for rank in range(p) if p <= MOST_COMPILED else (0, p // 2, p - 1):
        program = lower(schedule, schedule.chunks, rank)
        most = max(most, compile_steps(program.actions[rank], base, program.elements)[1] - base)
    return most
