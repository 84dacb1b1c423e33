"""Order of a pipeline's actions: when each starts and ends, and which never can.

This is the longest path through all lists, in one pass that looks at every action once: a hundred times faster than the
simulation message by message with which the tests compare it.

A rank takes its actions in order. Computations occupy it one after the other. Messages and collectives are started when
the computation before them has ended, and go on beside later ones: a message when both ends are posted and the link
between the two ranks, one each way, is free; gathers and reductions one after the other on a stream of the rank.

With `rendezvous` every action that an executor may stand still at does so: a send until its receive is posted, both
ends of the tied table for each other, all ranks for the loss. Lists that come to their end then do so under any
executor that waits less.
"""

from collections import defaultdict
from collections.abc import Sequence

from shardwise.records import dataclass
from shardwise.schedule.pipeline.action import COMPUTE, OURS, Action, without_collections
from shardwise.schedule.pipeline.plan import PipelineSchedule
from shardwise.schedule.pipeline.times import Times

Post = tuple[float, int, int]
"""One end of a message: when it was posted, by which rank, at which index of its list."""


@dataclass(frozen=True, order=True)
class BlockedRank:
    """A rank that waits forever: at its action `index`, for the action `awaited` of rank `peer`."""

    rank: int
    index: int
    action: Action
    awaited: Action
    peer: int


@dataclass
class Flow:
    """Result of a flow. spans: rank -> (start, end) of each action in seconds, messages from posting to completion;
    None where it never happened, and of messages under rendezvous. waiting: ranks that never came to their end."""

    spans: list[list[tuple[float, float] | None]]
    waiting: list[BlockedRank]


def flow(schedule: PipelineSchedule, times: Times | None = None, *, rendezvous: bool = False) -> Flow:
    """Follow all ranks to the end, or until none can go on. Without times everything takes none.

    rendezvous: sends and exchanges stand still until their other end is there; it is for `waiting` alone.
    The schedule's own lists must be in order: `verify` finds out before it asks who waits for whom.
    """
    return _Flow(schedule, times or Times.none(schedule.stages), rendezvous).run()


class _Flow:
    """Messages are numbered: by receiving stage, then micro-batch, then whether it is a gradient."""

    def __init__(self, schedule: PipelineSchedule, times: Times, rendezvous: bool) -> None:
        self.schedule, self.times, self.rendezvous = schedule, times, rendezvous
        ranks, messages = range(schedule.ranks), 2 * schedule.stages * schedule.micro
        self.fed = [self.first_received(stage) for stage in range(schedule.stages)]
        self.next = [0 for _ in ranks]
        self.now = [0.0 for _ in ranks]
        self.side = [0.0 for _ in ranks]
        self.spans: list[list[tuple[float, float] | None]] = [[None] * len(mine) for mine in schedule.actions]
        self.ready = list(ranks)[::-1]
        self.posted: list[Post | None] = [None] * messages
        self.arrived: list[float | None] = [None] * messages
        self.asleep: dict[int, int] = {}
        self.met: dict[str, set[int]] = defaultdict(set)
        self.exchanges: dict[tuple[str, int, int], Post] = {}
        self.link: dict[tuple[int, int], float] = defaultdict(float)
        self.gathered: dict[int, float] = {}
        self.reduced: dict[int, float] = defaultdict(float)

    def first_received(self, stage: int) -> tuple[int, int]:
        """The micro-batches from which on a stage's forwards and backwards wait for messages; all have a number."""
        schedule, never = self.schedule, self.schedule.micro
        last = schedule.stages - 1
        if stage:
            forward = 0 if schedule.crosses(stage, stage - 1) else never
        else:
            forward = schedule.ring if schedule.ring and schedule.crosses(0, last) else never
        return forward, 0 if stage < last and schedule.crosses(stage, stage + 1) else never

    def run(self) -> Flow:
        with without_collections():
            while self.ready:
                self.advance(self.ready.pop())
        stuck = [rank for rank, spans in enumerate(self.spans) if self.next[rank] < len(spans)]
        return Flow(self.spans, [self.waiting(rank) for rank in stuck])

    def waiting(self, rank: int) -> BlockedRank:
        """Reason why a rank cannot continue."""
        at = self.next[rank]
        action = self.schedule.actions[rank][at]
        if action.kind in COMPUTE:
            number = next(number for number, other in self.asleep.items() if other == rank)
            (stage, micro), gradient = divmod(number // 2, self.schedule.micro), number % 2
            end = Action("RECV_B" if gradient else "RECV_F", stage, micro)
        elif action.kind == "SHARE_LOSS":
            late = next(other for other in range(self.schedule.ranks) if other not in self.met[action.kind])
            return BlockedRank(rank, at, action, action, late)
        else:
            end = action
        awaited = self.schedule.partner(end)
        assert awaited
        return BlockedRank(rank, at, action, awaited, self.schedule.placement[awaited.stage])

    def advance(self, rank: int) -> None:
        mine, spans, posted = self.schedule.actions[rank], self.spans[rank], self.posted
        seconds, count, delay = self.times.by_kind, self.schedule.micro, 0.0 if self.times.overlap else self.times.hop
        index, now, end = self.next[rank], self.now[rank], len(mine)
        while index < end:
            kind, stage, micro, _, parts = action = mine[index]
            if kind in COMPUTE:
                begin = self.start(rank, parts or (action,), now)
                if begin is None:
                    break
                now = begin + (self.times.of(action) if parts else seconds[kind][stage])
                spans[index] = (begin, now)
            elif micro >= 0 and kind != "REDUCE_GRAD":
                if receives := kind == "RECV_F" or kind == "RECV_B":
                    number = 2 * (stage * count + micro) + (kind == "RECV_B")
                else:
                    number = self.lands(kind, stage, micro)
                if self.rendezvous:
                    if receives:
                        posted[number] = (now, rank, index)
                    elif posted[number]:
                        self.arrived[number] = now
                    else:
                        self.asleep[number] = rank
                        break
                    if number in self.asleep:
                        self.ready.append(self.asleep.pop(number))
                else:
                    now += 0.0 if receives else delay
                    other, post = posted[number], (now, rank, index)
                    if other is None:
                        posted[number] = post
                    else:
                        self.meet(number, *((other, post) if receives else (post, other)))
            else:
                if self.rendezvous and kind in OURS and not self.meets(rank, action):
                    break
                now = self.beside(rank, index, action, now)
            index += 1
        self.next[rank], self.now[rank] = index, now

    def meets(self, rank: int, action: Action) -> bool:
        """Whether all that an exchange is between have come to it; the last one wakes the others."""
        there = self.met[action.kind]
        new = rank not in there
        there.add(rank)
        whole = len(there) == (2 if action.kind == "SUM_TIED" else self.schedule.ranks)
        if whole and new:
            self.ready += there - {rank}
        return whole

    def lands(self, kind: str, stage: int, micro: int) -> int:
        count = self.schedule.micro
        if kind == "SEND_B":
            return 2 * ((stage - 1) * count + micro) + 1
        if stage + 1 < len(self.fed):
            return 2 * ((stage + 1) * count + micro)
        return 2 * (micro + self.schedule.ring)

    def start(self, rank: int, parts: Sequence[Action], now: float) -> float | None:
        """When a computation can start; None when a message for it is missing, whose arrival wakes the rank."""
        count = self.schedule.micro
        for kind, stage, micro, _, _ in parts:
            if kind != "W":
                gradient = kind != "F"
                if micro >= self.fed[stage][gradient]:
                    number = 2 * (stage * count + micro) + gradient
                    arrived = self.arrived[number]
                    if arrived is None:
                        self.asleep[number] = rank
                        return None
                    now = max(now, arrived)
            if self.gathered:
                now = max(now, self.gathered.get(stage, 0.0))
        return now

    def meet(self, number: int, sent: Post, received: Post) -> None:
        """Both ends of a message are posted: it goes when the link is free. Whoever waits for it can go on."""
        self.arrived[number] = self.transfer(sent, received, self.times.hop if self.times.overlap else 0.0)
        if number in self.asleep:
            self.ready.append(self.asleep.pop(number))

    def transfer(self, sent: Post, received: Post, seconds: float) -> float:
        """Note a message in both ends' spans, and when the link between them is free again; returns its arrival."""
        (left, src, at), (opened, dst, to) = sent, received
        arrival = max(left, opened, self.link[src, dst]) + seconds
        self.link[src, dst] = arrival
        for rank, index, begin in ((src, at, left), (dst, to, opened)):
            before = self.spans[rank][index]
            self.spans[rank][index] = (begin, arrival if before is None else max(before[1], arrival))
        return arrival

    def beside(self, rank: int, index: int, action: Action, now: float) -> float:
        """Start what goes on beside the computations; returns when the rank goes on."""
        kind, stage, _, peer, _ = action
        if kind in ("UNSHARD", "REDUCE_GRAD"):
            begin = max(now, self.side[rank])
            took = self.times.gather if kind == "UNSHARD" else self.times.reduce
            self.side[rank] = end = begin + took[stage]
            self.spans[rank][index] = (begin, end)
            (self.gathered if kind == "UNSHARD" else self.reduced)[stage] = end
        elif kind == "SUM_TIED":
            now = max(now, self.reduced[stage])
            self.exchange("SUM_TIED", rank, [(rank, peer), (peer, rank)], now, index, self.times.tied)
        elif kind == "SHARE_LOSS":
            root = self.schedule.loss_rank
            others = range(self.schedule.ranks) if rank == root else [rank]
            self.spans[rank][index] = (now, now)
            self.exchange("SHARE_LOSS", rank, [(root, dst) for dst in others if dst != root], now, index, 0.0)
        else:
            self.spans[rank][index] = (now, now)
        return now

    def exchange(
        self, what: str, rank: int, pairs: Sequence[tuple[int, int]], now: float, index: int, seconds: float
    ) -> None:
        """Post this rank's end of messages (source, destination) that nobody waits for before the end."""
        mine = (now, rank, index)
        for src, dst in pairs:
            other = self.exchanges.setdefault((what, src, dst), mine)
            if other is not mine:
                self.transfer(*((mine, other) if rank == src else (other, mine)), seconds)
