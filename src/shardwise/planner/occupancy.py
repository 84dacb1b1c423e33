"""Occupancy of a pipeline rank: what is there as backwards begin, counted from the schedule's own order.

Counts, not bytes: one order serves every size of model and micro-batch.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from shardwise.schedule.pipeline import Action
from shardwise.schedule.pipeline.registry import find, with_defaults
from shardwise.schedule.pipeline.steady import steady

MIDDLE, FIRST, LAST, WHOLE = range(4)
"""Kinds of stage: FIRST has the embedding, LAST the head, WHOLE both."""

MOST = 5
"""Moments of one kind of stage that are looked at: a bound needs not all of them."""

Counts = tuple[int, int, int, int]
"""By kind of stage."""


class Moment(NamedTuple):
    """The beginning of one backward."""

    kind: int
    """Kind of the stage whose backward begins."""
    after: int
    """Kind of the next other stage that the rank computes on; -1 where there is none."""
    saved: Counts
    """Micro-batches between forward and backward, those of each stage counted."""
    kept: Counts
    """Micro-batches between the gradients of inputs and those of weights."""
    accumulated: Counts
    """Stages whose gradients earlier micro-batches have left."""


def moments(schedule: str, p: int, m: int, v: int, place: int) -> tuple[Moment, ...]:
    """Moments of the rank at `place` of p ranks with v stages each and m micro-batches: for each kind of stage and
    number of accumulated stages the one with most micro-batches. Moments that another one exceeds in both are left
    out."""
    if p == 1:
        first = Moment(WHOLE, -1, (0, 0, 0, 1), (0,) * 4, (0,) * 4)
        return (first, first._replace(accumulated=(0, 0, 0, 1)))[: min(m, 2)]
    # A rank of the long schedule passes through every state of the short one. Where it holds all micro-batches, as many
    # more are there as the short one leaves out.
    short = steady(schedule, p, m)
    return _fullest(schedule, p, short.micro, v, place, m - short.micro if short.grows else 0)


@lru_cache(maxsize=4096)
def _fullest(schedule: str, p: int, m: int, v: int, place: int, more: int) -> tuple[Moment, ...]:
    generator = find(schedule)
    order = generator.order(p, m, v, place, **with_defaults(generator, {}, p))
    most: dict[tuple[int, int], tuple[int, Moment]] = {}
    for moment in _moments(order, p * v - 1, more):
        key, size = (moment.kind, sum(moment.accumulated)), sum(moment.saved) + sum(moment.kept)
        if key not in most or size > most[key][0]:
            most[key] = size, moment
    found: dict[int, list[Moment]] = {kind: [] for kind in range(4)}
    fullest = dict.fromkeys(found, -1)
    for (kind, _), (size, moment) in sorted(most.items(), reverse=True, key=lambda item: item[0]):
        if size > fullest[kind]:
            fullest[kind] = size
            found[kind].append(moment)
    return tuple(moment for of_kind in found.values() for moment in _some(of_kind))


def _some(rows: list[Moment]) -> list[Moment]:
    """At most `MOST` of the rows, the first and the last among them."""
    if len(rows) <= MOST:
        return rows
    return [rows[index * (len(rows) - 1) // (MOST - 1)] for index in range(MOST)]


def _moments(order: list[Action], last: int, more: int) -> list[Moment]:
    """Every moment. more: micro-batches that are there besides those of the order."""
    kinds = {a.stage: FIRST if a.stage == 0 else LAST if a.stage == last else MIDDLE for a in order}
    after, following = [-1] * len(order), -1
    for index, (one, other) in reversed(list(enumerate(pairwise(order)))):
        following = kinds[other.stage] if other.stage != one.stage else following
        after[index] = following
    saved, kept, accumulated = [0] * 4, [0] * 4, [0] * 4
    seen: set[int] = set()
    found = []
    for index, (does, stage, *_) in enumerate(order):
        kind = kinds[stage]
        if does == "F":
            saved[kind] += 1
            continue
        if does != "W":
            there = [count + (more if each == kind else 0) for each, count in enumerate(saved)]
            found.append(Moment(kind, after[index], tuple(there), tuple(kept), tuple(accumulated)))  # type: ignore[arg-type]
            saved[kind] -= 1
        kept[kind] += {"I": 1, "W": -1}.get(does, 0)
        if does != "I" and stage not in seen:
            seen.add(stage)
            accumulated[kind] += 1
    return found
