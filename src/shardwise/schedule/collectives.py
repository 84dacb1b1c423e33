"""The eight collectives: which chunks count as input on which rank, and what every rank must hold in the end.

In terms of a schedule's data chunks, with p ranks; chunk i belongs to rank i where a collective divides its data:

    broadcast   every rank has the root's chunks        reduce          the root has the sums of all ranks' chunks
    scatter     rank i has the root's chunk i           gather          the root has chunk i of rank i
    all-gather  every rank has chunk i of rank i        reduce-scatter  rank i has the sum of all ranks' chunks i
    all-reduce  every rank has the sums of all chunks   all-to-all      chunk j of rank i is rank j's chunk i
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardwise.records import dataclass
from shardwise.schedule.comm import CommSchedule, Ints

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUM = -1
"""In `ChunkGoal.of_rank`: the sum over all ranks."""

COLLECTIVES = {
    "broadcast": "one rank's data on every rank",
    "scatter": "one rank's data, a piece for every rank",
    "gather": "every rank's piece on one rank",
    "reduce": "the sum of all ranks' data on one rank",
    "all-gather": "every rank's piece on every rank",
    "reduce-scatter": "the sum of all ranks' data, a piece for every rank",
    "all-reduce": "the sum of all ranks' data on every rank",
    "all-to-all": "a piece of every rank for every rank",
}
ROOTED = ("broadcast", "scatter", "gather", "reduce")


@dataclass(frozen=True, eq=False)
class ChunkGoal:
    """Required result of a collective, row by row: chunk `chunk` of rank `rank`'s memory must end as input chunk
    `of_chunk` of `of_rank`, or the SUM."""

    rank: Ints
    chunk: Ints
    of_rank: Ints
    of_chunk: Ints


def inputs(schedule: CommSchedule) -> NDArray[np.bool_]:
    """Which data chunks are input on which rank; shape (ranks, chunks)."""
    p, c = schedule.ranks, schedule.chunks
    if schedule.collective in ("broadcast", "scatter"):
        return np.broadcast_to(np.arange(p)[:, None] == schedule.root, (p, c))
    if schedule.collective in ("gather", "all-gather"):
        return np.eye(p, c, dtype=bool)
    return np.ones((p, c), dtype=bool)


def wanted(schedule: CommSchedule) -> ChunkGoal:
    """Required contents of the region of the result on every rank, in rank order; ranks without a result have no
    rows."""
    p, c, kind = schedule.ranks, schedule.chunks, schedule.collective
    ranks, chunks = np.arange(p), np.arange(c)
    if kind in ("scatter", "reduce-scatter"):
        rank, chunk = ranks, ranks
    elif kind in ("reduce", "gather"):
        rank, chunk = np.full(c, schedule.root), chunks
    else:
        rank, chunk = np.repeat(ranks, c), np.tile(chunks, p)
    of_rank, of_chunk = np.full(len(rank), SUM), chunk
    if kind in ("broadcast", "scatter"):
        of_rank = np.full(len(rank), schedule.root)
    elif kind in ("gather", "all-gather"):
        of_rank = chunk
    elif kind == "all-to-all":
        of_rank, of_chunk = chunk, rank
    return ChunkGoal(rank, schedule.region(schedule.result) + chunk, of_rank, of_chunk)
