"""The textbook costs of collectives in several segments and on two kinds of links, to compare prices with."""

from math import ceil, log2

from shardwise.schedule.closed_forms import Factors, Terms
from shardwise.schedule.network import Tier


def levels_of(p: int) -> int:
    return ceil(log2(p))


def share(p: int) -> float:
    return (p - 1) / p


def chain(p: int, segments: int) -> Factors:
    """Broadcast down a pipelined chain of p > 1 ranks: p + s - 2 rounds of one segment. Source: Chan et al. 2007."""
    rounds = p + segments - 2
    return rounds, rounds / segments, 0


def double_tree(p: int, segments: int) -> Factors:
    """All-reduce by two trees, about: s + 2L rounds of one segment each way. Source: Sanders, Speck, Träff 2009, where
    the best s gives nβ + 2Lα + sqrt(8Lαnβ) each way."""
    rounds = segments + 2 * log2(p)
    return 2 * rounds, 2 * rounds / segments, rounds / segments


def hierarchical(
    g: int, nodes: int, nbytes: float, intra: Tier, inter: Tier, gamma: float = 0.0, nics: int | None = None
) -> Terms:
    """All-reduce of `nodes` nodes of g ranks: rings inside nodes around a ring across. Source: Cho et al. 2019.

    nics: NICs of a node, g or fewer, that its g ranks share; left out, g.
    """
    half = hierarchical_half(g, nodes, nbytes, intra, inter, nics)
    return Terms(2 * half.alpha, 2 * half.beta, share(g * nodes) * nbytes * gamma)


def hierarchical_half(g: int, nodes: int, nbytes: float, intra: Tier, inter: Tier, nics: int | None = None) -> Terms:
    """The reduce-scatter or the all-gather of `hierarchical`; the additions of the former are (p - 1)/p nγ besides."""
    across = share(nodes) * nbytes / (nics or g)
    return Terms(
        (g - 1) * intra.alpha + (nodes - 1) * inter.alpha, share(g) * nbytes * intra.beta + across * inter.beta, 0.0
    )


def hierarchical_masters(g: int, nodes: int, nbytes: float, intra: Tier, inter: Tier, gamma: float = 0.0) -> Terms:
    """All-reduce of `nodes` nodes of g ranks: binomial trees inside nodes around a ring of one master a node, each on
    one NIC. Source: Jia et al. 2018."""
    levels = levels_of(g)
    return Terms(
        2 * levels * intra.alpha + 2 * (nodes - 1) * inter.alpha,
        2 * levels * nbytes * intra.beta + 2 * share(nodes) * nbytes * inter.beta,
        (levels + share(nodes)) * nbytes * gamma,
    )
