"""Running a `Program` inside one process: with values, with times, and with sends that wait for their receives.

`play` is a discrete-event simulation. Without a clock everything takes no time, and what is left is the question
whether it ends at all: a send completes together with its receive (rendezvous), so a program that relies on buffering
deadlocks here. With memory, it moves real numbers.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwise.schedule.sending import Instruction, Program, Span


class Compute(NamedTuple):
    """A computation beside a collective's instructions. stream: what it occupies beside the rank, one at a time."""

    seconds: float = 0.0
    after: tuple[int, ...] = ()
    label: str = ""
    stream: str = ""
    kind: str = "compute"
    peer: int = -1
    spans: tuple[Span, ...] = ()
    source: tuple[Span, ...] = ()


Memory = NDArray[np.generic]
Add = Callable[[Memory, Memory], Memory]


class Clock(Protocol):
    """How long things take, in seconds. `elements` are those of the message, or those that are added."""

    def message(self, src: int, dst: int, elements: int) -> float: ...

    def addition(self, elements: int) -> float: ...


@dataclass(frozen=True)
class Stuck:
    """An action that never completed: it was posted and its partner never came, or it was never started."""

    rank: int
    index: int
    action: Instruction | Compute
    posted: bool

    def __str__(self) -> str:
        a = self.action
        what = f"send to rank {a.peer}" if a.kind == "send" else f"receive from rank {a.peer}"
        what = what if a.kind in ("send", "recv") else a.kind
        state = "waits for its partner" if self.posted else "waits for an earlier action"
        return f"rank {self.rank}, action {self.index} ({what}{', ' + a.label if a.label else ''}) {state}"


@dataclass
class Played:
    """What came of a program.

    seconds: when the last action ended. spans: rank -> (start, end) of each action in seconds, (nan, nan) where it
    never started. stuck: what never completed, rank by rank; empty when all went well. problems: messages whose
    receive expected another size.
    """

    seconds: float
    spans: list[list[tuple[float, float]]]
    stuck: list[Stuck] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def deadlock(self) -> str:
        """Who waits for whom, around the circle where there is one; empty when everything completed."""
        waiting = {found.rank: found for found in reversed(self.stuck) if found.posted}
        if not waiting:
            return str(self.stuck[0]) if self.stuck else ""
        chain: list[Stuck] = []
        rank = self.stuck[0].rank if self.stuck[0].rank in waiting else min(waiting)
        while rank in waiting and waiting[rank] not in chain:
            chain.append(waiting[rank])
            rank = waiting[rank].action.peer
        return "; ".join(map(str, chain))


def play(
    program: Program,
    clock: Clock | None = None,
    memory: Sequence[Memory] | None = None,
    add: Add = np.add,
    ports: Literal["rank", "pair"] = "rank",
) -> Played:
    """Run all ranks to the end, or until nothing can go on.

    clock: what messages and additions take; without one, nothing.
    ports: with "rank", each rank has one port to send and one to receive (single-ported, full duplex), and a message
    holds both for its time; with "pair", it holds only the link between the two ranks, one each way. Messages that are
    ready never wait for others than those at their ports; what stands first in the ranks' lists goes first.
    memory: an array of `program.elements` numbers for each rank, changed in place. add: (there, arriving) -> sum.
    """
    player = _Player(program, clock, memory, add, ports)
    player.run()
    return player.played()


Message = tuple[int, int, int, int]
"""Source rank and index of its send, destination rank and index of its receive."""


Port = tuple[int, int]
"""(source, -1) or (-1, destination) of a rank's own ports; (source, destination) of the link between two."""


class _Player:
    def __init__(
        self, program: Program, clock: Clock | None, memory: Sequence[Memory] | None, add: Add, ports: str
    ) -> None:
        ranks = program.ranks
        self.paired = ports == "pair"
        self.actions, self.clock, self.memory, self.add = program.actions, clock, memory, add
        self.now = 0.0
        self.next = [0] * ranks
        self.done = [bytearray(len(mine)) for mine in program.actions]
        self.awaited: list[set[int]] = [set() for _ in range(ranks)]
        self.spans = [[(np.nan, np.nan)] * len(mine) for mine in program.actions]
        self.busy: defaultdict[tuple[int, str], float] = defaultdict(float)
        self.sends: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.receives: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.occupied: set[Port] = set()
        self.wanting: defaultdict[Port, set[Message]] = defaultdict(set)
        self.candidates: set[Message] = set()
        self.events: list[tuple[float, int, tuple[tuple[int, int], ...]]] = []
        self.count = 0
        self.problems: list[str] = []

    def run(self) -> None:
        for rank in range(len(self.actions)):
            self.advance(rank)
        self.settle()
        while self.events:
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                self.complete(heappop(self.events)[2])
            self.settle()

    def ports(self, src: int, dst: int) -> tuple[Port, ...]:
        return ((src, dst),) if self.paired else ((src, -1), (-1, dst))

    def complete(self, ended: tuple[tuple[int, int], ...]) -> None:
        self.effect(ended)
        for rank, index in ended:
            self.done[rank][index] = 1
        if len(ended) == 2:
            for port in self.ports(ended[0][0], ended[1][0]):
                self.occupied.discard(port)
                self.candidates |= self.wanting[port]
        for rank, index in ended:
            awaited = self.awaited[rank]
            if index in awaited:
                awaited.discard(index)
                if not awaited:
                    self.advance(rank)

    def settle(self) -> None:
        """Start the messages whose ports are free, when all that happens at this time has happened."""
        for message in sorted(self.candidates, key=lambda m: (m[1] + m[3], m)):
            src, sent, dst, received = message
            ports = self.ports(src, dst)
            if not self.occupied.isdisjoint(ports):
                continue
            self.occupied.update(ports)
            for port in ports:
                self.wanting[port].discard(message)
            elements = self.actions[src][sent].elements
            seconds = self.clock.message(src, dst, elements) if self.clock else 0.0
            self.end(self.now, self.now + seconds, ((src, sent), (dst, received)))
        self.candidates.clear()

    def advance(self, rank: int) -> None:
        """Start the rank's actions up to the first that must wait."""
        mine, done = self.actions[rank], self.done[rank]
        while self.next[rank] < len(mine):
            index = self.next[rank]
            missing = {earlier for earlier in mine[index].after if not done[earlier]}
            if missing:
                self.awaited[rank] = missing
                return
            self.next[rank] += 1
            self.start(rank, index, mine[index])

    def start(self, rank: int, index: int, action: Instruction | Compute) -> None:
        if action.kind == "send":
            self.post(self.sends, self.receives, (rank, action.peer), index)
        elif action.kind == "recv":
            self.post(self.receives, self.sends, (action.peer, rank), index)
        else:
            seconds, stream = (action.seconds, action.stream) if isinstance(action, Compute) else (0.0, "")
            if action.kind == "reduce" and self.clock:
                seconds = self.clock.addition(action.elements)
            begin = max(self.now, self.busy[rank, stream])
            self.busy[rank, stream] = begin + seconds
            self.end(begin, begin + seconds, ((rank, index),))

    def post(
        self,
        mine: defaultdict[tuple[int, int], deque[int]],
        partners: defaultdict[tuple[int, int], deque[int]],
        pair: tuple[int, int],
        index: int,
    ) -> None:
        mine[pair].append(index)
        if not partners[pair]:
            return
        src, dst = pair
        sent, received = self.sends[pair].popleft(), self.receives[pair].popleft()
        elements = self.actions[src][sent].elements
        expected = self.actions[dst][received].elements
        if elements != expected:
            self.problems.append(
                f"rank {src} sends {elements} elements to rank {dst}, which expects {expected} "
                f"({self.actions[src][sent].label})"
            )
        message = (src, sent, dst, received)
        for port in self.ports(src, dst):
            self.wanting[port].add(message)
        self.candidates.add(message)

    def end(self, begin: float, finish: float, which: tuple[tuple[int, int], ...]) -> None:
        for rank, index in which:
            self.spans[rank][index] = (begin, finish)
        self.count += 1
        heappush(self.events, (finish, self.count, which))

    def effect(self, ended: tuple[tuple[int, int], ...]) -> None:
        if self.memory is None:
            return
        if len(ended) == 2:
            (src, sent), (dst, received) = ended
            source, target = self.actions[src][sent].spans, self.actions[dst][received].spans
            message = np.concatenate([self.memory[src][a:b] for a, b in source])
            at = 0
            for a, b in target:
                self.memory[dst][a:b] = message[at : at + b - a]
                at += b - a
            return
        ((rank, index),) = ended
        action, mine = self.actions[rank][index], self.memory[rank]
        for (a, b), (c, d) in zip(action.spans, action.source, strict=True):
            mine[a:b] = self.add(mine[a:b], mine[c:d]) if action.kind == "reduce" else mine[c:d]

    def played(self) -> Played:
        stuck = [
            Stuck(rank, index, action, index < self.next[rank])
            for rank, mine in enumerate(self.actions)
            for index, action in enumerate(mine)
            if not self.done[rank][index]
        ]
        seconds = max((end for spans in self.spans for _, end in spans if end == end), default=0.0)
        return Played(float(seconds), self.spans, stuck, self.problems)
