"""Scatter and gather: a piece of one rank's data for every rank, and back."""

from __future__ import annotations

from shardwise.schedule.algorithms import patterns
from shardwise.schedule.algorithms.registry import algorithm
from shardwise.schedule.comm import Draft, RepeatedRounds


def scatter_down(p: int, root: int = 0) -> list[RepeatedRounds]:
    """Down a binomial tree, to every child the pieces of all ranks below it."""
    return [
        RepeatedRounds.once(patterns.around((up + root) % p, (down + root) % p, down + root, below, p), "scatter")
        for up, down, below in patterns.tree_edges(p)
    ]


@algorithm("scatter", "binomial", source="Chan et al. 2007")
def scatter(p: int, root: int = 0) -> Draft:
    """Pieces down a binomial tree, halved at every level."""
    return Draft(p, scatter_down(p, root))


@algorithm("gather", "binomial", source="Chan et al. 2007")
def gather(p: int, root: int = 0) -> Draft:
    """Pieces up a binomial tree, doubled at every level."""
    stages = [
        RepeatedRounds.once(patterns.around((down + root) % p, (up + root) % p, down + root, below, p), "gather")
        for up, down, below in reversed(patterns.tree_edges(p))
    ]
    return Draft(p, stages)
