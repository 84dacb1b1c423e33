"""Building blocks of algorithms: a pass around rings, binomial trees, halving and doubling, folding, pipelines.

Each is a list of `RepeatedRounds`s. `v` is the vector of all ranks that take part; q is a power of two, p any number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardwise.errors import UserError
from shardwise.schedule.comm import Ints, RepeatedRounds, Round

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def power_below(p: int) -> int:
    """The largest power of two that is not above p."""
    return 1 << (p.bit_length() - 1)


def distances(p: int) -> list[int]:
    """1, 2, 4, ... below p: ceil(log2 p) of them."""
    return [1 << k for k in range((p - 1).bit_length())]


def ring_pass(
    size: int,
    ranks: Ints,
    at: Ints,
    next: Ints,
    *,
    reduce: bool,
    base: Ints | int = 0,
    spacing: int = 1,
    count: int = 1,
    stride: int = 1,
) -> list[RepeatedRounds]:
    """size - 1 rounds around rings of `size` ranks: each rank hands on the block that it was handed.

    ranks: all that take part; at: the place of each in its ring; next: the rank after it. Block i of a ring is `count`
    chunks, `stride` apart, from base + i * spacing on. With `reduce`, the rank at place i ends with the sum of all
    blocks i (reduce-scatter); without, it begins with block i, and all end with all blocks (all-gather).
    """

    def make(k: int) -> Round:
        block = (at - k - reduce) % size
        first = base + block * spacing
        return Round.of(ranks, next, first, count=count, stride=stride, reduce=reduce)

    return [RepeatedRounds(make, size - 1, "reduce-scatter" if reduce else "all-gather")] if size > 1 else []


def simple_ring(p: int, reduce: bool) -> list[RepeatedRounds]:
    """`ring_pass` around all p ranks, block i being chunk i."""
    v = np.arange(p)
    return ring_pass(p, v, v, (v + 1) % p, reduce=reduce)


def tree_edges(p: int) -> list[tuple[Ints, Ints, Ints]]:
    """The binomial tree under 0, level by level from the root: (parents, children, ranks below each child, itself
    included). Below child c are the ranks c, c + 1, ...: one contiguous span. Any p, ceil(log2 p) levels."""
    levels = []
    for d in reversed(distances(p)):
        parents = np.arange(0, p - d, 2 * d)
        children = parents + d
        levels.append((parents, children, np.minimum(d, p - children)))
    return levels


def tree(
    p: int, root: int = 0, members: Ints | None = None, chunks: int = 1, *, up: bool = False
) -> list[RepeatedRounds]:
    """All chunks from a root down a binomial tree of p ranks: ceil(log2 p) rounds; or (`up`) backwards, their sum up to
    its root.

    members: shape (trees, p), the ranks of several trees that work at the same time, roots first; left out, one tree of
    all ranks under `root`.
    """
    of = ((np.arange(p) + root) % p)[None] if members is None else members
    edges = [(of[:, parents].ravel(), of[:, children].ravel()) for parents, children, _ in tree_edges(p)]
    if up:
        return [RepeatedRounds.once(Round.of(b, a, 0, count=chunks, reduce=True), "reduce") for a, b in edges[::-1]]
    return [RepeatedRounds.once(Round.of(a, b, 0, count=chunks), "broadcast") for a, b in edges]


def around(src: ArrayLike, dst: ArrayLike, first: ArrayLike, count: ArrayLike, p: int) -> Round:
    """Chunks first, first + 1, ... modulo p, `count` of them: a span that runs over the end is two rows."""
    first = np.asarray(first) % p
    before = np.minimum(count, p - first)
    return Round.join(
        Round.of(src, dst, first, count=before),
        Round.of(src, dst, 0, count=count - before),
    )


def halving(q: int, p: int) -> list[RepeatedRounds]:
    """Reduce-scatter among ranks 0 .. q-1 by recursive halving, of p chunks, q <= p < 2q: rank v ends with the sums of
    chunk v, and of chunk q + v where there is one."""
    return [RepeatedRounds.once(_exchange(q, p, d, reduce=True), "reduce-scatter") for d in reversed(distances(q))]


def doubling(q: int, p: int) -> list[RepeatedRounds]:
    """All-gather among ranks 0 .. q-1 by recursive doubling: `halving` backwards."""
    return [RepeatedRounds.once(_exchange(q, p, d, reduce=False), "all-gather") for d in distances(q)]


def _exchange(q: int, p: int, d: int, reduce: bool) -> Round:
    """Ranks at distance d swap blocks of d chunks: the partner's block when reducing, their own when gathering."""
    v = np.arange(q)
    block = ((v ^ d) if reduce else v) & ~(d - 1)
    rows = [
        Round.of(v, v ^ d, first, count=np.minimum(d, p - first), reduce=reduce)
        for first in ([block, q + block] if p > q else [block])
    ]
    return Round.join(*rows)


def nodes_of(p: int, node: int) -> tuple[int, int]:
    """(ranks of a node, nodes). node=0 stands for the largest divisor of p up to 8, the usual number of devices.

    Raises `UserError` when a node's ranks do not divide p.
    """
    g = node or max(g for g in range(1, min(8, p) + 1) if p % g == 0)
    if p % g:
        fitting = ", ".join(str(g) for g in range(1, min(p, 64) + 1) if p % g == 0)
        raise UserError(f"node={node} does not divide {p} ranks; these do: {fitting}")
    return g, p // g


def node_rings(p: int, node: int, reduce: bool) -> list[RepeatedRounds]:
    """Reduce-scatter inside nodes, then across them (`reduce`); or all-gather across them, then inside.

    Rank i * g + j is place j of node i. Ranks at place j of all nodes form a ring across that carries the chunks of
    place j, each over a NIC of its own.
    """
    g, nodes = nodes_of(p, node)
    v = np.arange(p)
    i, j = np.divmod(v, g)
    inside = ring_pass(g, v, j, i * g + (j + 1) % g, reduce=reduce, count=nodes, stride=g)
    across = ring_pass(nodes, v, i, (i + 1) % nodes * g + j, reduce=reduce, base=j, spacing=g)
    return [*inside, *across] if reduce else [*across, *inside]


def read_all(p: int, reduce: bool) -> list[RepeatedRounds]:
    """One round in which each rank reads from all others: their part of its own chunk, to add (`reduce`), or theirs."""
    dst, src = np.divmod(np.arange(p * p), p)
    dst, src = dst[src != dst], src[src != dst]
    label = "read and add" if reduce else "read"
    return [RepeatedRounds.once(Round.of(src, dst, dst if reduce else src, reduce=reduce), label)] if p > 1 else []


def fold_in(p: int, q: int, chunk: ArrayLike = 0, count: int = 1, reduce: bool = True) -> list[RepeatedRounds]:
    """Ranks q .. p-1, which a power of two leaves over, give their part to ranks 0, 1, ... before it begins."""
    extra = np.arange(q, p)
    return (
        [RepeatedRounds.once(Round.of(extra, extra - q, chunk, count=count, reduce=reduce), "fold in")] if p > q else []
    )


def fold_out(p: int, q: int, chunk: ArrayLike = 0, count: int = 1) -> list[RepeatedRounds]:
    """Ranks 0, 1, ... give the result to the ranks q .. p-1 that had been folded in."""
    extra = np.arange(q, p)
    return [RepeatedRounds.once(Round.of(extra - q, extra, chunk, count=count), "fold out")] if p > q else []


def pipelined(
    src: Ints,
    dst: Ints,
    start: Ints,
    first: Ints | int,
    segments: int,
    *,
    period: int = 1,
    up: bool = False,
) -> list[RepeatedRounds]:
    """Segments one behind the other along the edges of trees: edge e carries chunk first[e] + j in round
    start[e] + j * period, for j < segments.

    up: the same backwards, from children (dst) to parents (src), adding.
    """
    first = np.broadcast_to(first, src.shape)

    def at(t: int) -> Round:
        segment, phase = np.divmod(t - start, period)
        live = (segment >= 0) & (segment < segments) & (phase == 0)
        ends = (dst, src) if up else (src, dst)
        return Round.of(ends[0][live], ends[1][live], (first + segment)[live], reduce=up)

    # A time at which no edge is due would be an empty round. Edges that start together are due together.
    moving: dict[int, list[int]] = {}
    for begin in np.unique(start).tolist():
        for t in range(begin, begin + segments * period, period):
            moving.setdefault(t, []).append(begin)
    label = "reduce" if up else "broadcast"
    return [
        RepeatedRounds(lambda _, t=t: at(t), 1, label, (label, *moving[t]))  # type: ignore[misc]
        for t in sorted(moving, reverse=up)
    ]


def two_trees(p: int) -> list[tuple[Ints, Ints]]:
    """Two binary trees over p ranks as (parent, child) edges, breadth first: a rank with two children in one has none
    in the other. Source: Sanders, Speck, Träff 2009; numbered as in NCCL (trees.cc)."""
    v = np.arange(1, p)
    low = v & -v
    parent = (v ^ low) | (low << 1)
    parent = np.where(parent < p, parent, v ^ low)
    depth = np.zeros(p, dtype=np.int64)
    for bit in reversed(distances(p)):
        level = v[low == bit]
        depth[level] = depth[parent[low == bit]] + 1
    order = np.argsort(depth[v], kind="stable")
    up, down = parent[order], v[order]
    other = (lambda r: p - 1 - r) if p % 2 == 0 else (lambda r: (r + 1) % p)
    return [(up, down), (other(up), other(down))]


def two_colours(src: Ints, dst: Ints) -> NDArray[np.int64]:
    """A colour, 0 or 1, for each edge, so that no rank has two outgoing or two incoming edges of one colour.

    There is one whenever no rank has more than two of either: ranks as senders and ranks as receivers are the two
    sides of a bipartite graph, whose edges form paths and even cycles.
    """
    edges = len(src)
    partner = [_other_at(src, edges), _other_at(dst, edges)]
    colour = np.full(edges, -1, dtype=np.int64)
    ends = [(e, side) for side in (0, 1) for e in range(edges) if partner[side][e] < 0]
    for e, side in [*ends, *((e, 0) for e in range(edges))]:
        # From the end of a path, or anywhere on a cycle, away from `side`.
        shade = 0
        while e >= 0 and colour[e] < 0:
            colour[e] = shade
            side, shade = 1 - side, 1 - shade
            e = partner[side][e]
    return colour


def first_rounds(src: Ints, dst: Ints, colour: Ints) -> Ints:
    """For each edge of one tree, breadth first, the first round in which something can come along it: after what came
    to its parent, in an even round for colour 0 and in an odd one for colour 1."""
    arrival: dict[int, int] = {}
    for up, down, shade in zip(src.tolist(), dst.tolist(), colour.tolist(), strict=True):
        earliest = arrival.get(up, -1) + 1
        arrival[down] = earliest + (earliest + shade) % 2
    return np.array([arrival[down] for down in dst.tolist()], dtype=np.int64)


def _other_at(ends: Ints, edges: int) -> list[int]:
    partner, seen = [-1] * edges, dict[int, int]()
    for e, end in enumerate(ends.tolist()):
        if end in seen:
            partner[e], partner[seen[end]] = seen[end], e
        else:
            seen[end] = e
    return partner
