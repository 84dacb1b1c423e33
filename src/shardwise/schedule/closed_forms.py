"""The textbook costs of collectives, and lower bounds, on p ranks behind equal links.

Each is a latencies, b times n bytes sent and c times n bytes added, n being the bytes of the full tensor; the tables
give (a, b, c). Nothing here knows the schedules: tests hold the two against each other. L is log2 p, q the largest
power of two that is not above p.
"""

from collections import Counter
from collections.abc import Callable
from math import ceil, log2
from typing import NamedTuple

from shardwise.records import dataclass
from shardwise.schedule.network import Network


class Terms(NamedTuple):
    """Seconds by cause: latency, bytes sent, bytes added."""

    alpha: float
    beta: float
    gamma: float

    @property
    def seconds(self) -> float:
        return self.alpha + self.beta + self.gamma


Factors = tuple[float, float, float]
"""(a, b, c): latencies, bytes sent and bytes added, the last two as multiples of the full tensor."""


@dataclass(frozen=True)
class CollectiveFormula:
    """Closed form of one algorithm's cost. factors: p -> (a, b, c). powers: it holds for powers of two only. source:
    where it is from."""

    factors: Callable[[int], Factors]
    source: str
    powers: bool = False

    def holds(self, p: int) -> bool:
        return not self.powers or p & (p - 1) == 0

    def at(self, p: int, nbytes: float, alpha: float, beta: float, gamma: float = 0.0) -> Terms:
        """Seconds for n bytes on p ranks."""
        a, b, c = self.factors(p)
        return Terms(a * alpha, b * nbytes * beta, c * nbytes * gamma)


def _levels(p: int) -> int:
    return ceil(log2(p))


def _share(p: int) -> float:
    return (p - 1) / p


def _folded(p: int, factors: Callable[[int, int], Factors]) -> Factors:
    """`factors` of (q, log2 q), plus 2α + 2nβ + nγ for folding in and out where p is no power of two."""
    levels = p.bit_length() - 1
    a, b, c = factors(1 << levels, levels)
    return (a, b, c) if p == 1 << levels else (a + 2, b + 2, c + 1)


_THAKUR = "Thakur, Rabenseifner, Gropp 2005"
_CHAN = "Chan et al. 2007"
_READS = "one latency a round; each rank reads from p - 1 others"

CLOSED_FORMS: dict[tuple[str, str], CollectiveFormula] = {
    ("all-reduce", "ring"): CollectiveFormula(
        lambda p: (2 * (p - 1), 2 * _share(p), _share(p)), "Patarasuk and Yuan 2009"
    ),
    ("all-reduce", "recursive-doubling"): CollectiveFormula(lambda p: _folded(p, lambda q, L: (L, L, L)), _THAKUR),
    ("all-reduce", "rabenseifner"): CollectiveFormula(
        lambda p: _folded(p, lambda q, L: (2 * L, 2 * _share(q), _share(q))), _THAKUR
    ),
    ("all-reduce", "tree"): CollectiveFormula(lambda p: (2 * _levels(p), 2 * _levels(p), _levels(p)), _CHAN),
    ("all-reduce", "one-shot"): CollectiveFormula(lambda p: (min(1, p - 1), p - 1, p - 1), _READS),
    ("all-reduce", "two-shot"): CollectiveFormula(
        lambda p: (2 * min(1, p - 1), 2 * _share(p), _share(p)), _READS
    ),
    ("all-reduce", "central-server"): CollectiveFormula(
        lambda p: (2 * (p - 1), 2 * (p - 1), p - 1), "p - 1 messages into one port, and out of it"
    ),
    ("broadcast", "binomial"): CollectiveFormula(lambda p: (_levels(p), _levels(p), 0), _CHAN),
    ("broadcast", "scatter-allgather"): CollectiveFormula(lambda p: (_levels(p) + p - 1, 2 * _share(p), 0), _THAKUR),
    ("reduce", "binomial"): CollectiveFormula(lambda p: (_levels(p), _levels(p), _levels(p)), _CHAN),
    ("scatter", "binomial"): CollectiveFormula(lambda p: (_levels(p), _share(p), 0), _CHAN),
    ("gather", "binomial"): CollectiveFormula(lambda p: (_levels(p), _share(p), 0), _CHAN),
    ("all-gather", "ring"): CollectiveFormula(lambda p: (p - 1, _share(p), 0), _CHAN),
    ("all-gather", "recursive-doubling"): CollectiveFormula(lambda p: (_levels(p), _share(p), 0), _THAKUR, powers=True),
    ("all-gather", "bruck"): CollectiveFormula(lambda p: (_levels(p), _share(p), 0), "Bruck et al. 1997"),
    ("reduce-scatter", "ring"): CollectiveFormula(lambda p: (p - 1, _share(p), _share(p)), "Patarasuk and Yuan 2009"),
    ("reduce-scatter", "halving"): CollectiveFormula(lambda p: (_levels(p), _share(p), _share(p)), _THAKUR,
        powers=True),
    ("reduce-scatter", "pairwise"): CollectiveFormula(lambda p: (p - 1, _share(p), _share(p)), _THAKUR),
    ("all-gather", "one-shot"): CollectiveFormula(lambda p: (min(1, p - 1), _share(p), 0), _READS),
    ("reduce-scatter", "one-shot"): CollectiveFormula(lambda p: (min(1, p - 1), _share(p), _share(p)), _READS),
    ("all-to-all", "pairwise"): CollectiveFormula(lambda p: (p - 1, _share(p), 0), _THAKUR),
    ("all-to-all", "bruck"): CollectiveFormula(lambda p: (_levels(p), _levels(p) / 2, 0), "Bruck et al. 1997",
        powers=True),
}  # fmt: skip
"""By (collective, algorithm)."""


_LEAST: dict[str, Callable[[int], tuple[float, float]]] = {
    "broadcast": lambda p: (min(1, p - 1), 0),
    "scatter": lambda p: (_share(p), 0),
    "gather": lambda p: (_share(p), 0),
    "reduce": lambda p: (min(1, p - 1), _share(p)),
    "all-gather": lambda p: (_share(p), 0),
    "reduce-scatter": lambda p: (_share(p), _share(p)),
    "all-reduce": lambda p: (2 * _share(p), _share(p)),
    "all-to-all": lambda p: (_share(p), 0),
}
"""Bytes that must be sent by some rank, and added by some rank, as multiples of the full tensor."""


def lower_bound(collective: str, p: int) -> Factors:
    """Lower bound of any algorithm on p single-ported ranks: ceil(L) α, b nβ, c nγ, each term for itself.

    Their sum is not always attainable. Source: Chan et al. 2007; for all-to-all, p - 1 of p pieces leave each rank.
    """
    return _levels(p), *_LEAST[collective](p)


def lower_bounds(collective: str, network: Network, nbytes: float, reads: bool = False) -> Terms:
    """`lower_bound` on a network of two tiers.

    Latency: as many steps on the faster link, one of them across nodes where there are several. Bytes: a rank's port at
    the faster link's bandwidth, or what must pass a node's NICs. reads: for ranks that read each other's memory, which
    need no more than one step.
    """
    if network.sizes:
        around = network.near(nbytes)
        found = [(share, lower_bounds(collective, network.sizes[i][1], nbytes, reads)) for i, share in around]
        return Terms(*(sum(share * terms[k] for share, terms in found) for k in range(3)))
    p, nodes = network.ranks, network.nodes
    steps, sent, added = lower_bound(collective, p)
    steps = min(steps, 1) if reads else steps
    fastest = min(network.intra.alpha, network.inter.alpha)
    alpha = network.startup * (steps > 0) + steps * fastest + (network.inter.alpha - fastest if nodes > 1 else 0.0)
    port = sent * nbytes * (min(network.intra.beta, network.inter.beta) if nodes > 1 else network.intra.beta)
    nic = _through_a_node(collective, network) * nbytes * network.inter.beta * network.sharing / network.nics
    return Terms(alpha, max(port, nic), added * nbytes * network.gamma)


def _through_a_node(collective: str, network: Network) -> float:
    """Bytes that some node must send, or receive, as a multiple of the full tensor: the bound for as many ranks as
    there are nodes, with pieces as large as the nodes' shares."""
    p, nodes = network.ranks, network.nodes
    shares = [g / p for g in Counter(network.node.tolist()).values()]
    if collective in ("scatter", "gather"):
        return 1 - max(shares)
    if collective in ("all-gather", "reduce-scatter"):
        return 1 - min(shares)
    if collective == "all-to-all":
        return max(p * share * (1 - share) for share in shares)
    return lower_bound(collective, nodes)[1]
