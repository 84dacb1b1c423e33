"""The policy by which the replicas of a layout agree. Beside `sync`, because policies load numpy and layouts do not."""

from __future__ import annotations

from shardwise.layout.layout import Layout
from shardwise.schedule.staleness import AtOnce, ByStep


def policy_of(layout: Layout, version: int = 0) -> ByStep | AtOnce:
    """When its replicas' gradients become an update, and when they continue: without servers in lockstep, step by step
    or round by round. version: updates so far."""
    if layout.sync == "async":
        return AtOnce(layout.dp, version)
    workers = layout.independent if layout.sync != "allreduce" else layout.training_ranks
    return ByStep(workers, layout.staleness, layout.backup, version)
