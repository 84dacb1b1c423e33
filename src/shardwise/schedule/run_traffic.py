"""Messages of a whole run between workers and servers: the ledger of a step, as often as the run's record says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.report.step_report import StepReport
from shardwise.schedule.update_record import UpdateRecord


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
