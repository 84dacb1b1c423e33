"""All-gather: every rank's piece on every rank."""

import numpy as np

from shardwise.schedule.algorithms import patterns
from shardwise.schedule.algorithms.registry import READS, algorithm
from shardwise.schedule.comm import Draft, RepeatedRounds


@algorithm("all-gather", "ring", source="Chan et al. 2007")
def ring(p: int) -> Draft:
    """Each rank hands on the piece that it was handed."""
    return Draft(p, patterns.simple_ring(p, reduce=False))


@algorithm("all-gather", "recursive-doubling", natural="powers of two", source="Thakur, Rabenseifner, Gropp 2005")
def recursive_doubling(p: int) -> Draft:
    """Pairs at distance 1, 2, 4, ... swap all that they have."""
    q = patterns.power_below(p)
    return Draft(
        p,
        [
            *patterns.fold_in(p, q, np.arange(q, p), reduce=False),
            *patterns.doubling(q, p),
            *patterns.fold_out(p, q, count=p),
        ],
    )


@algorithm("all-gather", "bruck", source="Bruck et al. 1997")
def bruck(p: int) -> Draft:
    """The first pieces of each rank to the rank 1, 2, 4, ... before it."""
    v = np.arange(p)
    return Draft(
        p,
        [
            RepeatedRounds.once(patterns.around(v, (v - d) % p, v, min(d, p - d), p), "all-gather")
            for d in patterns.distances(p)
        ],
    )


@algorithm("all-gather", "hierarchical", natural="multiples of a node", source="Cho et al. 2019")
def hierarchical(p: int, node: int = 0) -> Draft:
    """Across nodes, each rank on its own NIC, then inside nodes."""
    return Draft(p, patterns.node_rings(p, node, reduce=False))


@algorithm("all-gather", "one-shot", **READS)
def one_shot(p: int) -> Draft:
    """Each rank reads all others' pieces."""
    return Draft(p, patterns.read_all(p, reduce=False))
