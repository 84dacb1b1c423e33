"""From the order in which ranks compute to all that they do: messages, gathers, reductions, the loss.

Generators write down only the former. Receives are put ahead: the j-th receive from a rank is posted before the
computation that takes the (j - ahead)-th. Since posting follows the order in which the other side sends, and no receive
comes after a computation that needs a later one, a correct order of computations cannot deadlock by its messages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from shardwise.schedule.pipeline.action import Action
from shardwise.schedule.pipeline.plan import PipelineSchedule, Reduce

Posts = dict[int, list[Action]]
"""Index of a computation -> what is posted before it."""

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
    posts = _posts(bare, arriving, ahead)
    lists = []
    for rank, mine in enumerate(bare.actions):
        gathers = _gathers(mine, resident) if gather else {}
        frees = gathers.pop(len(mine), [])
        reductions = _reductions(mine, micro, reduce) if train else {}
        out: list[Action] = []
        for index, action in enumerate(mine):
            out += posts[rank].get(index, ())
            out += gathers.get(index, ())
            out.append(action)
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


def _messages(bare: PipelineSchedule) -> tuple[list[list[list[Action]]], dict[tuple[int, int], list[Action]]]:
    """Rank -> index of a computation -> its sends; (source, destination) -> receives in the order of the sends."""
    arriving: dict[tuple[int, int], list[Action]] = defaultdict(list)
    sends: list[list[list[Action]]] = []
    placement = bare.placement
    for rank, mine in enumerate(bare.actions):
        own = []
        for action in mine:
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
                arriving[rank, peer].append(Action(f"RECV_{way}", *after, rank))  # type: ignore[arg-type]
            own.append(found)
        sends.append(own)
    return sends, arriving


def _posts(bare: PipelineSchedule, arriving: dict[tuple[int, int], list[Action]], ahead: int) -> list[Posts]:
    """Rank -> what it posts before which computation."""
    used = [_consumers(mine) for mine in bare.actions]
    posts: list[Posts] = [defaultdict(list) for _ in bare.actions]
    for (_, rank), receives in arriving.items():
        latest = [used[rank][kind == "RECV_B", stage, micro] for kind, stage, micro, _, _ in receives]
        for j in range(len(latest) - 2, -1, -1):
            latest[j] = min(latest[j], latest[j + 1])
        for j, receive in enumerate(receives):
            at = latest[j - ahead] if j >= ahead else 0
            posts[rank][at].append(receive)
    return posts


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
