"""Broadcast and reduce: one rank's data to all, and all ranks' data summed on one."""

from __future__ import annotations

import numpy as np

from shardwise.schedule.algorithms.gather import scatter_down
from shardwise.schedule.algorithms.patterns import pipelined, simple_ring, tree_down, tree_up
from shardwise.schedule.algorithms.registry import PAIRS, algorithm
from shardwise.schedule.comm import Draft


@algorithm("broadcast", "binomial", "whole buffers down a binomial tree", source="Chan et al. 2007")
def binomial(p: int, root: int = 0) -> Draft:
    return Draft(1, tree_down(p, root))


@algorithm(
    "broadcast",
    "scatter-allgather",
    "pieces down a binomial tree, then around a ring",
    source="Thakur, Rabenseifner, Gropp 2005",
)
def scatter_allgather(p: int, root: int = 0) -> Draft:
    return Draft(p, [*scatter_down(p, root), *simple_ring(p, reduce=False)])


@algorithm(
    "broadcast",
    "chain",
    "segments one behind the other along a chain of all ranks",
    source="Chan et al. 2007",
    most=2 * PAIRS,
)
def chain(p: int, root: int = 0, segments: int = 8) -> Draft:
    link = np.arange(p - 1)
    return Draft(segments, pipelined((link + root) % p, (link + 1 + root) % p, link, 0, segments))


@algorithm("reduce", "binomial", "whole buffers up a binomial tree", source="Chan et al. 2007")
def binomial_reduce(p: int, root: int = 0) -> Draft:
    return Draft(1, tree_up(p, root))
