"""`Network`: a group of ranks on a cluster, in the terms of the α-β-γ model.

A message of n bytes takes α + n β, adding n bytes takes n γ. Every rank has one port to send and one to receive, which
work at the same time (single-ported, full duplex). α and β are those of the link inside a node or between nodes. Ranks
that talk across nodes in the same round share their node's NICs: together they move at most NICs / β bytes a second
each way.

Measured links say more (see `Link`): what a collective costs to start, what copies within a rank cost, and all speeds
by the size of a rank's memory, since what stays in a core's cache goes several times as fast as what does not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import field, replace
from functools import cached_property
from math import log
from typing import NamedTuple

import numpy as np

from shardwise.cluster import KINDS, Cluster, Link
from shardwise.errors import UserError
from shardwise.records import dataclass
from shardwise.schedule.comm import Ints

ADDITION_TRAFFIC = 3
"""Bytes through memory for each byte added: two operands are read, one sum is written."""


class Tier(NamedTuple):
    """One kind of link, or a rank's own memory. alpha: seconds a message, or a round's copies; beta: seconds a byte."""

    alpha: float
    beta: float


_FREE = Tier(0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Network:
    """A group of ranks and what connects them.

    node: the node of each rank, shape (ranks,). intra, inter: links inside a node and between nodes. gamma: seconds for
    each byte added. nics: NICs of a node, each with the bandwidth of `inter`. sharing: groups like this one that use a
    node's NICs at the same time. notes: what was assumed, a sentence each.

    startup: seconds of a collective, whatever its rounds. local: copies within a rank's own memory. reads: ranks read
    each other's memory in place of messages. repeated: the collective runs again and again on the same memory, as in a
    benchmark; then each byte that a rank reads inside a node, and nobody has written since, takes `saved` seconds less.
    sizes: (bytes of a rank's memory, the network for it), smallest first,
    where speeds depend on it; the network's own are then those of the largest.
    """

    node: Ints
    intra: Tier
    inter: Tier
    gamma: float
    nics: int = 1
    sharing: int = 1
    notes: tuple[str, ...] = field(default=())
    startup: float = 0.0
    local: Tier = _FREE
    reads: bool = False
    repeated: bool = False
    saved: float = 0.0
    sizes: tuple[tuple[float, Network], ...] = ()

    @classmethod
    def flat(cls, ranks: int, alpha: float, beta: float, gamma: float = 0.0) -> Network:
        """All ranks behind equal links: seconds a message, seconds a byte sent, seconds a byte added."""
        tier = Tier(alpha, beta)
        return cls(np.zeros(ranks, dtype=np.int64), tier, tier, gamma)

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        ranks: int | Sequence[int],
        nics: int | None = None,
        sharing: int = 1,
        repeated: bool = False,
    ) -> Network:
        """A group on a cluster: its first `ranks` devices, or those listed, in the group's order.

        nics: NICs of a node; left out the cluster's, which are one for each device unless it says otherwise.
        repeated: as a benchmark runs it.
        γ is three bytes of the device's memory traffic; where that is not known, additions count as free (see `notes`).
        Raises `UserError` for ranks that the cluster lacks, and where a link that is needed has no α or bandwidth.
        """
        devices = np.arange(ranks) if isinstance(ranks, int) else np.asarray(ranks, dtype=np.int64)
        if not len(devices) or devices.min() < 0 or len({*devices.tolist()}) < len(devices):
            raise UserError(f"a group needs one rank or more, each of them once, not {ranks!r}")
        if devices.max() >= cluster.devices:
            raise UserError(f"{devices.max() + 1} ranks do not fit {cluster}, which has {cluster.devices} devices")
        if nics is not None and nics < 1:
            raise UserError(f"a node needs at least one NIC, not {nics}")
        cluster = cluster.seen_by_group(devices.tolist())
        node = devices // cluster.devices_per_node
        notes: list[str] = []
        used = len({*node.tolist()})
        spread, inside = used > 1, used < len(node)
        inter = _tier(cluster, cluster.inter, "between nodes", "inter", notes) if spread else None
        intra = _tier(cluster, cluster.intra, "inside a node", "intra", notes) if inside else inter or Tier(0.0, 0.0)
        links = [cluster.inter] * spread + [cluster.intra] * inside
        bandwidth = cluster.device.memory_bandwidth
        if bandwidth is None and not any(link.speeds for link in links):
            notes.append(f"{cluster.device.name}: memory bandwidth not known, so additions count as free")
        network = cls(
            node=node,
            intra=intra,
            inter=inter or intra,
            gamma=ADDITION_TRAFFIC / bandwidth if bandwidth else 0.0,
            nics=nics or cluster.nics or cluster.devices_per_node,
            sharing=sharing,
            notes=tuple(notes),
            startup=max((link.startup for link in links), default=0.0),
            local=Tier(max((link.copy_alpha for link in links), default=0.0), 0.0),
            reads=any(link.reads for link in links),
            repeated=repeated,
        )
        knots = sorted({speed.nbytes for link in links for speed in link.speeds})
        sizes = tuple((nbytes, network._sized(links, nbytes)) for nbytes in knots)
        return replace(sizes[-1][1], sizes=sizes) if sizes else network

    def _sized(self, links: list[Link], nbytes: float) -> Network:
        """This network with the speeds of a rank's memory of `nbytes` bytes; of two links, the slower's additions.

        links: those in use, the one between nodes first.
        """
        # Where ranks need one link only, it stands for both.
        intra, inter = (
            tier._replace(beta=_seconds(link, "bandwidth", nbytes)) if link.speeds else tier
            for tier, link in ((self.intra, links[-1]), (self.inter, links[0]))
        )
        measured = [link for link in links if link.speeds]
        gamma, copy = (max(_seconds(link, what, nbytes) for link in measured) for what in ("addition", "copy"))
        saved = max(0.0, intra.beta - _seconds(links[-1], "again", nbytes)) if links[-1].speeds else 0.0
        return replace(self, intra=intra, inter=inter, gamma=gamma, local=self.local._replace(beta=copy), saved=saved)

    def near(self, nbytes: float) -> list[tuple[int, float]]:
        """(index in `sizes`, share) of the sizes around a rank's memory of `nbytes` bytes; shares add up to 1."""
        return _around([size for size, _ in self.sizes], nbytes)

    @property
    def ranks(self) -> int:
        return len(self.node)

    @cached_property
    def nodes(self) -> int:
        return len({*self.node.tolist()})

    @cached_property
    def per_node(self) -> int | None:
        """Ranks of a node where every node has equally many that follow each other in the group; else None."""
        g, rest = divmod(self.ranks, self.nodes)
        filled = not rest and bool((self.node.reshape(self.nodes, g) == self.node[::g, None]).all())
        return g if filled and len({*self.node[::g].tolist()}) == self.nodes else None


def _tier(cluster: Cluster, link: Link, where: str, field: str, notes: list[str]) -> Tier:
    alpha = link.alpha
    if link.bandwidth is None:
        what = "latency and bandwidth" if alpha is None else "bandwidth"
        raise UserError(
            f"{cluster}: the {what} of the link {where} is not known; "
            + ("name it, --network 100Gb, or " if field == "inter" else "")
            + f"give [{field}] alpha and bandwidth in a TOML file"
        )
    kind = KINDS.get(link.kind or ("network" if field == "inter" and cluster.device.kind == "cuda" else ""))
    if alpha is None and kind:
        alpha = kind.alpha
        notes.append(f"latency {where} taken as {alpha * 1e6:.1f} µs, that of {kind.words}: not measured here")
    if alpha is None:
        raise UserError(f"{cluster}: the latency of the link {where} is not known; give [{field}] alpha in a TOML file")
    return Tier(alpha, 1 / link.bandwidth)


def _around(sizes: Sequence[float], nbytes: float) -> list[tuple[int, float]]:
    """Straight between sizes over the logarithm of the size; beyond the first and the last one, these."""
    above = bisect_right(sizes, nbytes)
    if above in (0, len(sizes)):
        return [(min(above, len(sizes) - 1), 1.0)]
    low, high = sizes[above - 1], sizes[above]
    share = log(nbytes / low) / log(high / low)
    return [(above - 1, 1 - share), (above, share)]


def _seconds(link: Link, what: str, nbytes: float) -> float:
    """Seconds a byte of one of a link's speeds."""
    speeds: list[float | None] = [getattr(speed, what) for speed in link.speeds]
    if what == "again":
        speeds = [speed.again or speed.bandwidth for speed in link.speeds]
    around = _around([speed.nbytes for speed in link.speeds], nbytes)
    return sum(share / speed for index, share in around if (speed := speeds[index]))
