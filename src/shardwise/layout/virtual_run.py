"""Workers of a layout in virtual time: their servers' policy under slow ranks, without a model and without torch."""

import numpy as np

from shardwise.errors import UserError
from shardwise.layout.layout import Layout
from shardwise.layout.sync import policy_of
from shardwise.schedule.staleness import simulated
from shardwise.schedule.stragglers import Stragglers
from shardwise.schedule.update_record import MOST_LISTED, UpdateRecord


def virtual_run(layout: Layout, steps: int, seconds: float, stragglers: Stragglers) -> UpdateRecord:
    """The record of `steps` steps of a run whose gradients take `seconds` each, the exchange with the server included.

    A worker is as slow as its slowest rank. Under `sync=local` a gradient of the record is a round of a replica, which
    ends with the next outer step. Raises `UserError` for a rank that there is not, and for more than `MOST_LISTED`
    gradients.
    """
    if steps < 1 or seconds <= 0:
        raise UserError("a simulation needs at least one step, and time for a gradient")
    stragglers.check(layout.training_ranks)
    policy = policy_of(layout)
    ranks = layout.training_ranks // policy.workers
    every = layout.every if layout.local_sgd else 1
    if steps * policy.workers > MOST_LISTED:
        most = MOST_LISTED // policy.workers
        raise UserError(f"{steps} steps of {policy.workers} workers are too many to simulate: at most {most:,} steps")

    shares = policy.workers if layout.asynchronous else 1
    factors = stragglers.factors(range(layout.training_ranks), np.arange(steps * shares))
    slowest = factors.reshape(policy.workers, ranks, -1).max(axis=1)  # [workers, steps or shares]
    rounds = np.add.reduceat(slowest, np.arange(0, steps * shares, every), axis=1)
    taken = (seconds * rounds).tolist()
    return simulated(policy, policy.workers, len(taken[0]), lambda worker, step: float(taken[worker][step]))
