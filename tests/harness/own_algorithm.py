"""An algorithm of somebody who uses shardwise: one decorated function, which SHARDWISE_ALGORITHMS makes known."""

from shardwise.schedule import Draft, RepeatedRounds, Round
from shardwise.schedule.algorithms import algorithm


@algorithm("all-reduce", "chain", "up a chain of all ranks, and down again", source="a test")
def chain(p: int) -> Draft:
    up = [RepeatedRounds.once(Round.of(k, k - 1, 0, reduce=True), "up") for k in range(p - 1, 0, -1)]
    return Draft(1, [*up, *(RepeatedRounds.once(Round.of(k - 1, k, 0), "down") for k in range(1, p))])
