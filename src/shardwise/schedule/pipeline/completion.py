"""Completion of a schedule: messages, gathers, reductions and the loss, from the order in which ranks compute.

Generators write down only that order. Receives are put ahead: the j-th receive from a rank is posted before the
computation that takes the (j - ahead)-th, and in any case before its message is sent, where every F, I and W takes
equally long. In that order of time no send comes before its receive: so lists in which a send stands still until its
receive is posted cannot deadlock, where the order of computations cannot.

A rank's list is made on first use, so that following one rank costs one list.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from shardwise.schedule.pipeline.action import Action, Kind, without_collections
from shardwise.schedule.pipeline.plan import PipelineSchedule, Reduce

Posts = dict[int, list[Action]]
"""Index of a computation -> what is posted before it."""

Message = tuple[int, Action, Action]
"""Index of the computation whose result it is, the send, the receive."""

_FORWARD: tuple[Kind, Kind] = ("SEND_F", "RECV_F")
_BACKWARD: tuple[Kind, Kind] = ("SEND_B", "RECV_B")

AHEAD = 1
"""Receives posted ahead of the one whose message is being computed on: a second buffer for each neighbour."""

RESIDENT = 3
"""Stages of a rank that are gathered at a time: one for a forward, one for a backward, one that comes next."""


def gathers_of_a_stage(virtual: Any, rounds: Any, resident: int = RESIDENT) -> Any:
    """Gathers of a stage in a step, the mean over a rank's stages, under 1F1B, GPipe, zb-h1 and interleaved; of the
    rank that makes the most. Where a rank has more stages than stay gathered, each round of pp micro-batches gathers
    the others anew, for both passes.

    virtual: stages of a rank; rounds: micro-batches over pipeline ranks; numbers, or arrays of numbers.
    """
    apart = virtual - resident
    several = 2 * rounds * apart + 2 * resident + 1
    counted = np.where(rounds < 2, 2 * virtual - resident, several) / virtual
    return np.where(apart > 0, counted, 1.0)


def complete(
    name: str,
    order: Sequence[Sequence[Action]],
    placement: tuple[int, ...],
    micro: int,
    *,
    ahead: int = AHEAD,
    resident: int = RESIDENT,
    early: bool = False,
    **settings: Any,
) -> PipelineSchedule:
    """The schedule in which rank r computes `order[r]`. settings: further fields of `PipelineSchedule`.

    early: no rank waits for a gradient while another one computes those of weights (see `release`).
    """
    if early:
        order = [release(mine, placement) for mine in order]
    return completed(PipelineSchedule(name, micro, placement, tuple(map(tuple, order)), **settings), ahead, resident)


def completed(bare: PipelineSchedule, ahead: int = AHEAD, resident: int = RESIDENT) -> PipelineSchedule:
    """A schedule whose actions are the computations alone, with all others added."""
    return replace(bare, actions=_Lists(bare, ahead, resident))


class _Lists(Sequence[tuple[Action, ...]]):
    """The ranks' lists of a schedule, each completed on first use."""

    def __init__(self, bare: PipelineSchedule, ahead: int, resident: int) -> None:
        """bare: the order in which ranks compute."""
        self._bare, self._ahead, self._resident = bare, ahead, resident
        self._done: dict[int, tuple[Action, ...]] = {}
        self._messages: dict[int, list[Message]] = {}

    def __len__(self) -> int:
        return len(self._bare.actions)

    def __getitem__(self, at: Any) -> Any:
        ranks = range(len(self))[at]
        return self._of(ranks) if isinstance(ranks, int) else tuple(map(self._of, ranks))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _of(self, rank: int) -> tuple[Action, ...]:
        if rank not in self._done:
            with without_collections():
                self._done[rank] = self._completed(rank)
        return self._done[rank]

    def _completed(self, rank: int) -> tuple[Action, ...]:
        bare, mine = self._bare, self._bare.actions[rank]
        sends: Posts = defaultdict(list)
        for index, send, _ in self._leaving(rank):
            sends[index].append(send)
        arriving = [(source, [each for each in self._leaving(source) if each[1].peer == rank])
                    for source in _neighbors(bare, rank) if source != rank]  # fmt: skip
        posts = _posts(bare, rank, sends, arriving, self._ends, self._ahead)
        gathers = _gathers(mine, self._resident) if bare.gather else {}
        reductions = _reductions(mine, bare.micro, bare.reduce) if bare.train else {}
        out: list[Action] = []
        for index, action in enumerate(mine):
            out += (*posts.get(2 * index, ()), *gathers.get(index, ()), action)
            out += (*posts.get(2 * index + 1, ()), *sends.get(index, ()), *reductions.get(index, ()))
        return (*out, *gathers.get(len(mine), ()), *endings(bare, rank))

    def _leaving(self, rank: int) -> list[Message]:
        if rank not in self._messages:
            self._messages[rank] = _leaving(self._bare, rank)
        return self._messages[rank]

    @cached_property
    def _ends(self) -> list[list[int]]:
        return _ends(self._bare)


def release(mine: Sequence[Action], placement: tuple[int, ...]) -> list[Action]:
    """The order with each B whose input's gradient another rank waits for as I and W, so that the message leaves
    in between. An overlapped F&B stays as it is."""
    found = []
    for action in mine:
        kind, stage, micro, _, _ = action
        if kind == "B" and stage and placement[stage] != placement[stage - 1]:
            found += [Action("I", stage, micro), Action("W", stage, micro)]
        else:
            found.append(action)
    return found


def _neighbors(bare: PipelineSchedule, rank: int) -> list[int]:
    last = bare.stages - 1
    found = {bare.placement[stage + by] for stage in bare.held[rank] for by in (-1, 1) if 0 <= stage + by <= last}
    if bare.ring and 0 in bare.held[rank]:
        found.add(bare.placement[last])
    return sorted(found)


def _leaving(bare: PipelineSchedule, rank: int) -> list[Message]:
    placement, last, found = bare.placement, bare.stages - 1, []
    for index, action in enumerate(bare.actions[rank]):
        for kind, stage, micro, _, _ in action[4] or (action,):
            if kind == "F":
                after = (stage + 1, micro) if stage < last else bare.output_of(stage, micro)
            elif kind == "W" or not stage:
                continue
            else:
                after = stage - 1, micro
            if after is None or (peer := placement[after[0]]) == rank:
                continue
            send, receive = _FORWARD if kind == "F" else _BACKWARD
            found.append((index, Action(send, stage, micro, peer), Action(receive, *after, rank)))
    return found


def _posts(
    bare: PipelineSchedule, rank: int, sends: Posts, arriving: list[tuple[int, list[Message]]], ends: list[list[int]],
    ahead: int,
) -> Posts:  # fmt: skip
    """Messages that a rank posts: at 2i before its i-th computation, at 2i + 1 after it, before its sends."""
    used, own = _consumers(bare, rank), ends[rank]
    posts: Posts = defaultdict(list)
    for source, messages in arriving:
        theirs = ends[source]
        # What nothing computes on is posted at once: that a computation is missing is for `verify` to say.
        latest = [used.get(2 * (receive.stage * bare.micro + receive.micro) + (receive.kind != "RECV_F"), 0)
                  for _, _, receive in messages]  # fmt: skip
        latest = list(accumulate(reversed(latest), min))[::-1]
        before = 0
        for j, (index, _, receive) in enumerate(messages):
            at = 2 * latest[j - ahead] if j >= ahead else 0
            if at and index < len(theirs):
                sent = theirs[index]
                while before < len(own) and own[before] <= sent:
                    before += 1
                if at >= 2 * before:
                    # A computation that ends at that moment has it posted ahead of its own sends.
                    at = 2 * before - (before > 0 and own[before - 1] == sent and before - 1 in sends)
            posts[at].append(receive)
    return posts


def _ends(bare: PipelineSchedule) -> list[list[int]]:
    """Rank -> when each of its computations ends, where F, I and W take one unit each and messages none; as far as it
    gets in an order that deadlocks."""
    count, last = bare.micro, bare.stages - 1
    # Results are numbered: by stage, then micro-batch, then whether it is a gradient.
    made, asleep = [0] * (2 * bare.stages * count), {}
    ends: list[list[int]] = [[] for _ in bare.actions]
    ready = list(range(bare.ranks))[::-1]
    while ready:
        rank = ready.pop()
        own, mine = ends[rank], bare.actions[rank]
        now = own[-1] if own else 0
        for index in range(len(own), len(mine)):
            action = mine[index]
            if action[0] == "W":
                now += 1
                own.append(now)
                continue
            parts = action[4] or (action,)
            results, missing = [], -1
            for kind, stage, micro, _, _ in parts:
                if kind == "W":
                    continue
                number = 2 * (stage * count + micro)
                if kind == "F":
                    results.append(number)
                    if stage:
                        source = number - 2 * count
                    elif bare.ring and micro >= bare.ring:
                        source = 2 * (last * count + micro - bare.ring)
                    else:
                        continue
                else:
                    results.append(number + 1)
                    if stage == last:
                        continue
                    source = number + 2 * count + 1
                if not made[source]:
                    missing = source
                elif made[source] > now:
                    now = made[source]
            if missing >= 0:
                asleep[missing] = rank
                break
            for part in parts:
                now += 2 if part[0] == "B" else 1
            own.append(now)
            for number in results:
                made[number] = now
                if number in asleep:
                    ready.append(asleep.pop(number))
    return ends


def _consumers(bare: PipelineSchedule, rank: int) -> dict[int, int]:
    """The number of a forward's or a backward's result -> the index of the computation."""
    found, count = {}, bare.micro
    for index, action in enumerate(bare.actions[rank]):
        for kind, stage, micro, _, _ in action[4] or (action,):
            if kind != "W":
                found[2 * (stage * count + micro) + (kind != "F")] = index
    return found


def _gathers(mine: Sequence[Action], resident: int) -> Posts:
    """Frees and gathers before each computation, so that the next `resident` stages to compute are there."""
    most = max([resident, *(len(action[4]) for action in mine)])
    windows: list[list[int]] = []
    upcoming: list[int] = []
    for action in reversed(mine):
        for part in reversed(action[4] or (action,)):
            stage = part[1]
            if not upcoming or upcoming[0] != stage:
                upcoming = [stage, *(each for each in upcoming if each != stage)][:most]
        windows.append(upcoming if len(upcoming) <= resident else upcoming[: max(resident, len(action[4]))])
    there: list[int] = []
    found: Posts = {}
    before: list[int] = []
    for index, window in enumerate(reversed(windows)):
        if window is before:
            continue
        before = window
        freed = [stage for stage in there if stage not in window]
        added = [stage for stage in window if stage not in there]
        if freed or added:
            there = [stage for stage in there if stage in window] + added
            found[index] = [Action("RESHARD", stage) for stage in freed] + [Action("UNSHARD", stage) for stage in added]
    found[len(mine)] = [Action("RESHARD", stage) for stage in there]
    return found


def _reductions(mine: Sequence[Action], micro: int, reduce: Reduce) -> Posts:
    found: Posts = defaultdict(list)
    finished: Counter[int] = Counter()
    for index, action in enumerate(mine):
        for kind, stage, of, _, _ in action[4] or (action,):
            if kind in ("F", "I"):
                continue
            if reduce == "micro":
                found[index].append(Action("REDUCE_GRAD", stage, of))
                continue
            finished[stage] += 1
            if finished[stage] == micro:
                found[index].append(Action("REDUCE_GRAD", stage))
    return found


def endings(bare: PipelineSchedule, rank: int) -> list[Action]:
    """End of a rank's list in training: the tied table, then the loss."""
    found = []
    if rank in bare.tied_ends:
        first, last = bare.tied_ends
        stage, peer = (0, last) if rank == first else (bare.stages - 1, first)
        found.append(Action("SUM_TIED", stage, peer=peer))
    if bare.train:
        found.append(Action("SHARE_LOSS", bare.stages - 1, peer=bare.loss_rank))
    return found
