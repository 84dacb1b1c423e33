"""One rank of a verification: `python -m shardwise.runtime.module.verify_rank JOB.json`."""

from __future__ import annotations

import pickle
import sys
from dataclasses import asdict
from multiprocessing import spawn

from shardwise.runtime.job.rank import leave, main
from shardwise.runtime.module.comparison import compare_split, first_difference
from shardwise.runtime.module.verify import VerifyJob
from shardwise.runtime.transport.process_group import gather_objects


def run(rank: int, job: VerifyJob) -> None:
    """Compare, and leave rank 0's verdict over all ranks."""
    spawn.prepare(pickle.loads(bytes.fromhex(job.setup)))
    result = compare_split(pickle.loads(bytes.fromhex(job.request)))
    results = gather_objects(result)
    if rank == 0:
        job.leave(asdict(first_difference(results)))


if __name__ == "__main__":
    leave(main(sys.argv[1:], VerifyJob.read, run), at_once=True)
