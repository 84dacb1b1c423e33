"""Broadcast and reduce: one rank's data to all, and all ranks' data summed on one."""

import numpy as np

from shardwise.schedule.algorithms import patterns
from shardwise.schedule.algorithms.registry import PAIRS, algorithm
from shardwise.schedule.comm import Draft, RepeatedRounds


def pieces(p: int, root: int = 0, *, up: bool = False) -> list[RepeatedRounds]:
    """Down a binomial tree, to every child the pieces of all ranks below it; or (`up`) backwards, from every child."""
    edges = [((a + root) % p, (b + root) % p, b + root, below) for a, b, below in patterns.tree_edges(p)]
    if up:
        return [RepeatedRounds.once(patterns.around(b, a, first, n, p), "gather") for a, b, first, n in edges[::-1]]
    return [RepeatedRounds.once(patterns.around(*edge, p), "scatter") for edge in edges]


@algorithm("scatter", "binomial", source="Chan et al. 2007")
def scatter(p: int, root: int = 0) -> Draft:
    """Pieces down a binomial tree, halved at every level."""
    return Draft(p, pieces(p, root))


@algorithm("gather", "binomial", source="Chan et al. 2007")
def gather(p: int, root: int = 0) -> Draft:
    """Pieces up a binomial tree, doubled at every level."""
    return Draft(p, pieces(p, root, up=True))


@algorithm("broadcast", "binomial", source="Chan et al. 2007")
def binomial(p: int, root: int = 0) -> Draft:
    """Whole buffers down a binomial tree."""
    return Draft(1, patterns.tree(p, root))


@algorithm("broadcast", "scatter-allgather", source="Thakur, Rabenseifner, Gropp 2005")
def scatter_allgather(p: int, root: int = 0) -> Draft:
    """Pieces down a binomial tree, then around a ring."""
    return Draft(p, [*pieces(p, root), *patterns.simple_ring(p, reduce=False)])


@algorithm("broadcast", "chain", source="Chan et al. 2007", most=2 * PAIRS)
def chain(p: int, root: int = 0, segments: int = 8) -> Draft:
    """Segments one behind the other along a chain of all ranks."""
    link = np.arange(p - 1)
    return Draft(segments, patterns.pipelined((link + root) % p, (link + 1 + root) % p, link, 0, segments))


@algorithm("reduce", "binomial", source="Chan et al. 2007")
def binomial_reduce(p: int, root: int = 0) -> Draft:
    """Whole buffers up a binomial tree."""
    return Draft(1, patterns.tree(p, root, up=True))
