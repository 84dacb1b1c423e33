"""Broadcast and reduce: one rank's data to all, and all ranks' data summed on one."""

import numpy as np

from shardwise.schedule.algorithms import patterns
from shardwise.schedule.algorithms.registry import PAIRS, algorithm
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


@algorithm("broadcast", "binomial", source="Chan et al. 2007")
def binomial(p: int, root: int = 0) -> Draft:
    """Whole buffers down a binomial tree."""
    return Draft(1, patterns.tree_down(p, root))


@algorithm("broadcast", "scatter-allgather", source="Thakur, Rabenseifner, Gropp 2005")
def scatter_allgather(p: int, root: int = 0) -> Draft:
    """Pieces down a binomial tree, then around a ring."""
    return Draft(p, [*scatter_down(p, root), *patterns.simple_ring(p, reduce=False)])


@algorithm("broadcast", "chain", source="Chan et al. 2007", most=2 * PAIRS)
def chain(p: int, root: int = 0, segments: int = 8) -> Draft:
    """Segments one behind the other along a chain of all ranks."""
    link = np.arange(p - 1)
    return Draft(segments, patterns.pipelined((link + root) % p, (link + 1 + root) % p, link, 0, segments))


@algorithm("reduce", "binomial", source="Chan et al. 2007")
def binomial_reduce(p: int, root: int = 0) -> Draft:
    """Whole buffers up a binomial tree."""
    return Draft(1, patterns.tree_up(p, root))
