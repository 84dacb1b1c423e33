"""From the order in which ranks compute to all that they do: messages, gathers, reductions, the loss.

Generators write down only the former. Receives are put ahead: the j-th receive from a rank is posted before the
computation that takes the (j - ahead)-th, and in any case before its message is sent, where every F, I and W takes
equally long. In that order of time no send comes before its receive: so lists in which a send stands still until its
receive is posted cannot deadlock, where the order of computations cannot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence

from shardwise.schedule.pipeline.action import Action
from shardwise.schedule.pipeline.plan import PipelineSchedule, Reduce

Posts = dict[int, list[Action]]
"""Index of a computation -> what is posted before it."""

Sends = list[list[list[Action]]]
"""Rank -> index of a computation -> its sends."""

AHEAD = 1
"""Receives posted ahead of the one whose message is being computed on: a second buffer for each neighbour."""

RESIDENT = 3
"""Stages of a rank that are gathered at a time: one for a forward, one for a backward, one that comes next."""


def complete(
    name: str,
    order: Sequence[Sequence[Action]],
    placement: tuple[int, ...],
    micro: int,
    *,
    train: bool = True,
    gather: bool = False,
    reduce: Reduce = "step",
    tied: bool = False,
    ring: int = 0,
    ahead: int = AHEAD,
    resident: int = RESIDENT,
    early: bool = False,
    options: dict[str, int] | None = None,
) -> PipelineSchedule:
    """The schedule in which rank r computes `order[r]`; other arguments are `PipelineSchedule`'s and this module's.

    early: no rank waits for a gradient while another one computes those of weights (see `release`).
    """
    if early:
        order = [release(mine, placement) for mine in order]
    bare = PipelineSchedule(
        name, micro, placement, tuple(map(tuple, order)), train, gather, reduce, tied, ring, options or {}
    )
    sends, arriving = _messages(bare)
    posts = _posts(bare, sends, arriving, ahead)
    lists = []
    for rank, mine in enumerate(bare.actions):
        gathers = _gathers(mine, resident) if gather else {}
        frees = gathers.pop(len(mine), [])
        reductions = _reductions(mine, micro, reduce) if train else {}
        out: list[Action] = []
        for index, action in enumerate(mine):
            out += posts[rank].get(2 * index, ())
            out += gathers.get(index, ())
            out.append(action)
            out += posts[rank].get(2 * index + 1, ())
            out += sends[rank][index]
            out += reductions.get(index, ())
        lists.append((*out, *frees, *endings(bare, rank)))
    return PipelineSchedule(name, micro, placement, tuple(lists), train, gather, reduce, tied, ring, options or {})


def release(mine: Sequence[Action], placement: tuple[int, ...]) -> list[Action]:
    """The same order with each B whose input's gradient another rank waits for as I and W, so that the message leaves
    in between. An overlapped F&B stays as it is."""
    found = []
    for action in mine:
        stage = action.stage
        if action.kind == "B" and stage and placement[stage] != placement[stage - 1]:
            found += [action._replace(kind="I"), action._replace(kind="W")]
        else:
            found.append(action)
    return found


def _messages(bare: PipelineSchedule) -> tuple[Sends, dict[tuple[int, int], list[tuple[int, Action]]]]:
    """The sends; (source, destination) -> receives in the order of the sends, each with the index of the computation
    whose result it brings."""
    arriving: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    sends: Sends = []
    placement = bare.placement
    for rank, mine in enumerate(bare.actions):
        own = []
        for index, action in enumerate(mine):
            found = []
            for kind, stage, micro, _, _ in action.parts or (action,):
                if kind == "F":
                    after = bare.output_of(stage, micro)
                elif kind == "W" or not stage:
                    continue
                else:
                    after = stage - 1, micro
                if after is None or (peer := placement[after[0]]) == rank:
                    continue
                way = "F" if kind == "F" else "B"
                found.append(Action(f"SEND_{way}", stage, micro, peer))  # type: ignore[arg-type]
                arriving[rank, peer].append((index, Action(f"RECV_{way}", *after, rank)))  # type: ignore[arg-type]
            own.append(found)
        sends.append(own)
    return sends, arriving


def _posts(
    bare: PipelineSchedule, sends: Sends, arriving: dict[tuple[int, int], list[tuple[int, Action]]], ahead: int
) -> list[Posts]:
    """Rank -> what it posts: at 2i before its i-th computation, at 2i + 1 after it, before its sends."""
    used, ends = [_consumers(mine) for mine in bare.actions], _ends(bare)
    posts: list[Posts] = [defaultdict(list) for _ in bare.actions]
    for (source, rank), receives in arriving.items():
        # What nothing computes on is posted at once: that a computation is missing is for `verify` to say.
        latest = [used[rank].get((kind == "RECV_B", stage, micro), 0) for _, (kind, stage, micro, _, _) in receives]
        for j in range(len(latest) - 2, -1, -1):
            latest[j] = min(latest[j], latest[j + 1])
        for j, (index, receive) in enumerate(receives):
            at = 2 * latest[j - ahead] if j >= ahead else 0
            if at and index < len(ends[source]):
                sent = ends[source][index]
                before = bisect_right(ends[rank], sent)
                if at >= 2 * before:
                    # A computation that ends at that moment has it posted ahead of its own sends.
                    tie = before > 0 and ends[rank][before - 1] == sent and sends[rank][before - 1]
                    at = 2 * before - bool(tie)
            posts[rank][at].append(receive)
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
            parts = mine[index].parts or mine[index : index + 1]
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


def _consumers(mine: Sequence[Action]) -> dict[tuple[bool, int, int], int]:
    """(backward, stage, micro-batch) -> index of the computation that takes what was received for it."""
    found = {}
    for index, action in enumerate(mine):
        for kind, stage, micro, _, _ in action.parts or (action,):
            if kind != "W":
                found[kind != "F", stage, micro] = index
    return found


def _gathers(mine: Sequence[Action], resident: int) -> Posts:
    """Frees and gathers before each computation, so that the next `resident` stages to compute are there."""
    windows: list[list[int]] = []
    upcoming: list[int] = []
    for action in reversed(mine):
        for part in reversed(action.leaves()):
            upcoming = [part.stage, *(stage for stage in upcoming if stage != part.stage)]
        windows.append(upcoming[: max(resident, len(action.parts))])
    there: list[int] = []
    found: Posts = {}
    for index, window in enumerate(reversed(windows)):
        freed = [stage for stage in there if stage not in window]
        added = [stage for stage in window if stage not in there]
        if freed or added:
            there = [stage for stage in there if stage in window] + added
            found[index] = [Action("RESHARD", stage) for stage in freed] + [Action("UNSHARD", stage) for stage in added]
    found[len(mine)] = [Action("RESHARD", stage) for stage in there]
    return found


def _reductions(mine: Sequence[Action], micro: int, reduce: Reduce) -> Posts:
    """The reductions after each computation that finishes gradients of weights."""
    found: Posts = defaultdict(list)
    finished: Counter[int] = Counter()
    for index, action in enumerate(mine):
        for part in action.leaves():
            if part.kind in ("F", "I"):
                continue
            finished[part.stage] += 1
            if reduce == "micro":
                found[index].append(Action("REDUCE_GRAD", part.stage, part.micro))
            elif finished[part.stage] == micro:
                found[index].append(Action("REDUCE_GRAD", part.stage))
    return found


def endings(bare: PipelineSchedule, rank: int) -> list[Action]:
    """What stands at the end of a rank's list when it trains: the tied table, then the loss."""
    found = []
    if rank in bare.tied_ends:
        first, last = bare.tied_ends
        stage, peer = (0, last) if rank == first else (bare.stages - 1, first)
        found.append(Action("SUM_TIED", stage, peer=peer))
    if bare.train:
        found.append(Action("SHARE_LOSS", bare.stages - 1, peer=bare.loss_rank))
    return found
