"""A collective by other rounds than its algorithm's."""

from collections.abc import Sequence
from dataclasses import replace

from shardwise.schedule import CommSchedule, RepeatedRounds, Round


def with_rounds(schedule: CommSchedule, rounds: Sequence[Round]) -> CommSchedule:
    return replace(schedule, stages=tuple(RepeatedRounds.once(round) for round in rounds))
