"""All-to-all: a piece of every rank for every rank.

Chunk j of region "data" is for rank j, chunk i of region "out" is from rank i.
"""

import numpy as np

from shardwise.schedule.algorithms import patterns
from shardwise.schedule.algorithms.registry import PAIRS, algorithm
from shardwise.schedule.comm import Draft, RepeatedRounds, Round


@algorithm("all-to-all", "pairwise", source="Thakur, Rabenseifner, Gropp 2005")
def pairwise(p: int) -> Draft:
    """In round k with the ranks k further on and k before.

    p - 1 rounds, in each of which every rank sends one piece and receives one.
    """
    v = np.arange(p)

    def shift(k: int) -> Round:
        other = (v + k) % p
        return Round.of(v, other, other, to=p + v)

    stages = [RepeatedRounds.once(shift(0), "own piece"), *RepeatedRounds.each(range(1, p), shift, "exchange")]
    return Draft(p, stages, regions=("data", "out"), result="out")


@algorithm("all-to-all", "bruck", source="Bruck et al. 1997", most=PAIRS)
def bruck(p: int) -> Draft:
    """Pieces travel by the binary digits of their distance, many in one message.

    A piece for the rank k further on moves by d in the round of each binary digit d of k: k alone says where it is
    when. On the way it lies at place k of "scratch" and "spare" by turns, since the next piece k arrives while this one
    leaves.
    """
    v = np.arange(p)
    out, scratch = p, 2 * p

    def digit(d: int) -> Round:
        k = np.arange(1, p)
        k = k[(k & d) > 0]
        rank, k = np.repeat(v, len(k)), np.tile(k, p)
        below = k & (d - 1)
        hops = sum(((below & bit) > 0).astype(np.int64) for bit in patterns.distances(p))
        to_rank = (rank + d) % p
        at = np.where(hops == 0, (rank + k) % p, scratch + (hops + 1) % 2 * p + k)
        to = np.where(k < 2 * d, out + (to_rank - k) % p, scratch + hops % 2 * p + k)
        return Round.of(rank, to_rank, at, to=to)

    own = RepeatedRounds.once(Round.of(v, v, v, to=out + v), "own piece")
    stages = [own, *RepeatedRounds.each(patterns.distances(p), digit, "exchange")]
    return Draft(p, stages, regions=("data", "out", "scratch", "spare"), result="out")
