"""Broadcast and reduce: one rank's data to all, and all ranks' data summed on one."""

from __future__ import annotations

import numpy as np

from shardwise.schedule.algorithms import patterns
from shardwise.schedule.algorithms.gather import scatter_down
from shardwise.schedule.algorithms.registry import PAIRS, algorithm
from shardwise.schedule.comm import Draft


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
