"""Bytes that one rank sends in a schedule, and the rounds in which it takes part, exact for every size."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwise.report.step_report import StepReport
from shardwise.schedule.comm import CommSchedule, Ints
from shardwise.schedule.update_record import UpdateRecord

WINDOW = 1 << 20
"""Bytes that shared memory moves at a time, where a tensor is not in a segment: they stay in the core's cache."""


class Moved(NamedTuple):
    """Traffic of one rank. nbytes: sent to other ranks. steps: rounds in which it sends or receives."""

    nbytes: int
    steps: int


class _Rows(NamedTuple):
    first: Ints
    stop: Ints
    round: Ints
    sends: Ints


@lru_cache(maxsize=256)
def _rows(schedule: CommSchedule, rank: int) -> _Rows:
    columns: list[list[Ints]] = [[], [], [], []]
    for number, whole in enumerate(schedule.rounds()):
        mine = whole.take(((whole.src == rank) | (whole.dst == rank)) & (whole.src != whole.dst)).contiguous()
        parts = mine.chunk, mine.chunk + mine.count, np.full(len(mine), number), (mine.src == rank).astype(np.int64)
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
    return _Rows(*(np.concatenate([np.zeros(0, np.int64), *column]) for column in columns))


def moved(schedule: CommSchedule, elements: int, itemsize: int, rank: int) -> Moved:
    """Traffic of `rank` for a full tensor of `elements` elements of `itemsize` bytes."""
    rows, bounds = _rows(schedule, rank), schedule.bounds(elements)
    sizes = bounds[rows.stop] - bounds[rows.first]
    return Moved(int((sizes * rows.sends).sum()) * itemsize, len(np.unique(rows.round[sizes > 0])))


def windows(schedule: CommSchedule, elements: int, itemsize: int) -> list[tuple[int, int]]:
    """(start, width) of the parts of at most `WINDOW` bytes in which shared memory runs a schedule.

    Of an all-reduce they are parts of the tensor; else of each rank's piece of it.
    """
    ranks = 1 if schedule.collective == "all-reduce" else schedule.ranks
    most, piece = max(1, WINDOW // itemsize // ranks), elements // ranks
    return [(start, min(most, piece - start)) for start in range(0, piece, most)]


class WorkerTraffic(NamedTuple):
    """Messages of one worker over a run, by server and direction."""

    worker: int
    server: int
    op: str
    """push or pull."""
    messages: int
    nbytes: int


def run_traffic(report: StepReport, records: Sequence[UpdateRecord], ranks: int) -> list[WorkerTraffic]:
    """Messages of each worker that go with its gradients, the dropped ones included: each push or pull in the ledger of
    its step, as often as the server has recorded a gradient of it. Pulls where all workers meet come on top.

    ranks: of a worker.
    """
    rows = {}
    for role in report.roles:
        for rank in role.ranks:
            rows[rank] = [row for row in role.ledger if row.op in ("push", "pull")]
    result = []
    for server, record in enumerate(records):
        for worker, tally in enumerate(record.workers):
            for op in ("push", "pull"):
                own = [
                    row
                    for rank in range(worker * ranks, (worker + 1) * ranks)
                    for row in rows.get(rank, ())
                    if row.op == op and row.unit == f"server {server}"
                ]
                count, nbytes = sum(row.count for row in own), sum(row.payload_bytes for row in own)
                result.append(WorkerTraffic(worker, server, op, count * tally.gradients, nbytes * tally.gradients))
    return result
