"""Reduce-scatter: the sum of all ranks' data, a piece for every rank. In place: other pieces are left half summed."""

import numpy as np

from shardwise.schedule.algorithms import patterns
from shardwise.schedule.algorithms.registry import READS, algorithm
from shardwise.schedule.comm import Draft, RepeatedRounds, Round


@algorithm("reduce-scatter", "ring", source="Patarasuk and Yuan 2009")
def ring(p: int) -> Draft:
    """Each rank adds its part to the piece that it was handed, and hands it on."""
    return Draft(p, patterns.simple_ring(p, reduce=True))


@algorithm("reduce-scatter", "halving", natural="powers of two", source="Thakur, Rabenseifner, Gropp 2005")
def recursive_halving(p: int) -> Draft:
    """Pairs at distance p/2, p/4, ... swap the half that the other one keeps."""
    q = patterns.power_below(p)
    return Draft(
        p, [*patterns.fold_in(p, q, count=p), *patterns.halving(q, p), *patterns.fold_out(p, q, np.arange(q, p))]
    )


@algorithm("reduce-scatter", "pairwise", source="Thakur, Rabenseifner, Gropp 2005")
def pairwise(p: int) -> Draft:
    """In round k to the rank k + 1 further on, its piece.

    Every piece goes straight to its rank, which adds it; what a rank sends it has never changed.
    """
    v = np.arange(p)

    def shift(k: int) -> Round:
        other = (v + k) % p
        return Round.of(v, other, other, reduce=True)

    return Draft(p, RepeatedRounds.each(range(1, p), shift, "reduce-scatter"))


@algorithm("reduce-scatter", "hierarchical", natural="multiples of a node", source="Cho et al. 2019")
def hierarchical(p: int, node: int = 0) -> Draft:
    """Inside nodes, then across them, each rank on its own NIC."""
    return Draft(p, patterns.node_rings(p, node, reduce=True))


@algorithm("reduce-scatter", "one-shot", **READS)
def one_shot(p: int) -> Draft:
    """Each rank reads and adds all others' parts of its piece."""
    return Draft(p, patterns.read_all(p, reduce=True))
