"""Occupancy of a pipeline rank: what is there as backwards begin, counted from the schedule's own order.

Counts, not bytes: one order serves every size of model and micro-batch.
"""

from functools import lru_cache
from typing import NamedTuple

from shardwise.schedule.pipeline import Action
from shardwise.schedule.pipeline.registry import find, with_defaults
from shardwise.schedule.pipeline.simulate import steady

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
    most = _moments(order, p * v - 1, more)
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


def _moments(order: list[Action], last: int, more: int) -> dict[tuple[int, int], tuple[int, Moment]]:
    """(kind of stage, number of accumulated stages) -> micro-batches at the first moment with most of them, and that
    moment. more: micro-batches that are there besides those of the order."""
    saved, kept, accumulated = [0] * 4, [0] * 4, [0] * 4
    seen: set[int] = set()
    several = len({action.stage for action in order}) > 1
    held, most = more, dict[tuple[int, int], tuple[int, Moment]]()
    for index, (does, stage, *_) in enumerate(order):
        kind = FIRST if stage == 0 else LAST if stage == last else MIDDLE
        if does == "F":
            saved[kind] += 1
            held += 1
            continue
        if does != "W":
            key = kind, len(seen)
            if key not in most or held > most[key][0]:
                there = [count + (more if each == kind else 0) for each, count in enumerate(saved)]
                after = _next_kind(order, index, last) if several else -1
                most[key] = held, Moment(kind, after, tuple(there), tuple(kept), tuple(accumulated))  # type: ignore[arg-type]
            saved[kind] -= 1
            held -= 1
        if does != "B":
            change = 1 if does == "I" else -1
            kept[kind] += change
            held += change
        if does != "I" and stage not in seen:
            seen.add(stage)
            accumulated[kind] += 1
    return most


def _next_kind(order: list[Action], index: int, last: int) -> int:
    stages = (action.stage for action in order[index:])
    following = next((stage for stage in stages if stage != order[index].stage), None)
    if following is None:
        return -1
    return FIRST if following == 0 else LAST if following == last else MIDDLE
