"""All-reduce: the sum of all ranks' data on every rank, with the same bits on every rank."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shardwise.schedule.algorithms import patterns
from shardwise.schedule.algorithms.registry import READS, algorithm
from shardwise.schedule.comm import Draft, RepeatedRounds, Round

if TYPE_CHECKING:
    from numpy.typing import NDArray

_THAKUR = "Thakur, Rabenseifner, Gropp 2005"


@algorithm("all-reduce", "ring", source="Patarasuk and Yuan 2009")
def ring(p: int) -> Draft:
    """Reduce-scatter around a ring, then all-gather."""
    return Draft(p, [*patterns.simple_ring(p, reduce=True), *patterns.simple_ring(p, reduce=False)])


@algorithm("all-reduce", "tree", source="Chan et al. 2007")
def tree(p: int) -> Draft:
    """Up a binomial tree, and down again."""
    return Draft(1, [*patterns.tree(p, up=True), *patterns.tree(p)])


@lru_cache(maxsize=4)
def _timed_trees(p: int) -> tuple[NDArray[np.int64], ...]:
    """The edges of both trees, parents and children, and the first round of each; kept for other numbers of segments,
    since they are found edge by edge."""
    trees = patterns.two_trees(p)
    src, dst = (np.concatenate(ends) for ends in zip(*trees, strict=True))
    colours = np.split(patterns.two_colours(src, dst), 2)
    return src, dst, np.concatenate([patterns.first_rounds(*tree, of) for tree, of in zip(trees, colours, strict=True)])


@algorithm("all-reduce", "double-tree", source="Sanders, Speck, Träff 2009")
def double_tree(p: int, segments: int = 8) -> Draft:
    """Half of the segments up and down one binary tree, half another one.

    Every rank has two children in one tree at most, so that it sends and receives one segment a round: edges of one
    colour are due in even rounds, those of the other in odd ones.
    """
    half = (segments + 1) // 2
    src, dst, start = _timed_trees(p)
    first = np.repeat([0, half], p - 1)
    up, down = (patterns.pipelined(src, dst, start, first, half, period=2, up=up) for up in (True, False))
    return Draft(2 * half, [*up, *down])


@algorithm("all-reduce", "recursive-doubling", natural="powers of two", source=_THAKUR)
def recursive_doubling(p: int) -> Draft:
    """Pairs at distance 1, 2, 4, ... swap and add whole buffers (butterfly).

    Both of a pair add the same two sums, so addition being commutative is enough for equal bits.
    """
    q = patterns.power_below(p)
    v = np.arange(q)
    swaps = [RepeatedRounds.once(Round.of(v, v ^ d, 0, reduce=True), "exchange") for d in patterns.distances(q)]
    return Draft(1, [*patterns.fold_in(p, q), *swaps, *patterns.fold_out(p, q)])


@algorithm("all-reduce", "rabenseifner", natural="powers of two", source=_THAKUR)
def rabenseifner(p: int) -> Draft:
    """Reduce-scatter by recursive halving, all-gather by doubling."""
    q = patterns.power_below(p)
    return Draft(
        q,
        [
            *patterns.fold_in(p, q, count=q),
            *patterns.halving(q, q),
            *patterns.doubling(q, q),
            *patterns.fold_out(p, q, count=q),
        ],
    )


@algorithm("all-reduce", "hierarchical", natural="multiples of a node", source="Mikami et al. 2018; Cho et al. 2019")
def hierarchical(p: int, node: int = 0) -> Draft:
    """Reduce-scatter inside nodes, all-reduce across them, all-gather inside."""
    return Draft(p, [*patterns.node_rings(p, node, reduce=True), *patterns.node_rings(p, node, reduce=False)])


@algorithm("all-reduce", "hierarchical-masters", natural="multiples of a node", source="Jia et al. 2018")
def hierarchical_masters(p: int, node: int = 0) -> Draft:
    """Up a tree to each node's master, a ring of the masters, down again.

    The master is the first rank of its node. One NIC of a node works; the other ranks wait for their master.
    """
    g, nodes = patterns.nodes_of(p, node)
    members = np.arange(p).reshape(nodes, g)
    masters = members[:, 0]
    ring = nodes, masters, np.arange(nodes), np.roll(masters, -1)
    stages = [
        *patterns.tree(g, members=members, chunks=nodes, up=True),
        *patterns.ring_pass(*ring, reduce=True),
        *patterns.ring_pass(*ring, reduce=False),
        *patterns.tree(g, members=members, chunks=nodes),
    ]
    return Draft(nodes, stages)


@algorithm("all-reduce", "one-shot", **READS)
def one_shot(p: int) -> Draft:
    """Each rank reads all others' buffers and adds them in rank order.

    Into a buffer of its own, since the others read this one; in rank order, so that all ranks get the same bits.
    """
    dst, src = np.divmod(np.arange(p * p), p)
    everything = Round.of(src, dst, 0, to=1, reduce=src > 0)
    return Draft(1, [RepeatedRounds.once(everything, "read and add")], regions=("data", "out"), result="out")


@algorithm("all-reduce", "two-shot", **READS)
def two_shot(p: int) -> Draft:
    """Each rank reads and adds all others' parts of one piece, then reads the other pieces."""
    return Draft(p, [*patterns.read_all(p, reduce=True), *patterns.read_all(p, reduce=False)])


@algorithm("all-reduce", "central-server", source="Li et al. 2014 (parameter server)")
def central_server(p: int) -> Draft:
    """All send to rank 0, which adds and sends back: for contrast.

    All traffic passes the server's one port: 2 (p - 1) buffers.
    """
    others = np.arange(1, p)
    if p == 1:
        return Draft(1, [])
    up, down = Round.of(others, 0, 0, reduce=True), Round.of(0, others, 0)
    return Draft(1, [RepeatedRounds.once(up, "push"), RepeatedRounds.once(down, "pull")])
