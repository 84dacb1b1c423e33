"""Rounds of a run of `sync=local`, as the events of rank 0's replica have them."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from shardwise.schedule.staleness import Update
from shardwise.schedule.update_record import UpdateRecord


class OuterRound(NamedTuple):
    """The steps from one outer step to the next. Times are seconds since the first event's step began."""

    number: int
    steps: int
    last_step: int
    """Number of its last step, from 1."""
    started: float
    ended: float
    """When its outer step was over."""
    loss: float
    """Mean over the tokens of all replicas (`outer_loss`); NaN of a round that has not ended."""


def outer_rounds(events: Iterable[Mapping[str, Any]]) -> list[OuterRound]:
    """The rounds of a run's events; the last one may not have ended yet. A step that a resumed run has done again
    counts once, as it was done last."""
    steps = {event["step"]: event for event in events if "loss" in event and "step" in event}
    rounds: list[OuterRound] = []
    now = started = 0.0
    count = 0
    for number in sorted(steps):
        event = steps[number]
        now, count = now + float(event.get("seconds", 0.0)), count + 1
        if "outer_loss" in event or number == max(steps):
            loss = float(event.get("outer_loss", math.nan))
            rounds.append(OuterRound(len(rounds), count, number, started, now, loss))
            started, count = now, 0
    return rounds


def record_of_rounds(rounds: Iterable[OuterRound]) -> UpdateRecord:
    """The rounds that have ended as a record of one replica, whose gradients are the outer ones."""
    record = UpdateRecord(1)
    for one in rounds:
        if not math.isnan(one.loss):
            record.push(0, one.number, one.number, one.started, one.ended)
            record.update(Update(one.number, one.number, ((0, one.number),)), one.ended)
            record.answer(0, one.ended)
    return record
