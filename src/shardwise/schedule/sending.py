"""Work of one rank to run a schedule by sends, compiled once for a size.

Torch-free, so that prediction counts the memory that the runtime allocates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shardwise.schedule.comm import CommSchedule, Span
from shardwise.schedule.program import Instruction, lower

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
