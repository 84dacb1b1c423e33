"""One rank of an emulated pipeline: `python -m shardwise.emulate.rank JOB.json`."""

import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from shardwise.emulate.job import WORD, EmulationCase, EmulationJob
from shardwise.emulate.worker import TimedWorker
from shardwise.layout import Layout
from shardwise.layout.axes import PP
from shardwise.runtime.job.output import rewrite_line
from shardwise.runtime.job.rank import leave, main
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.pipeline.executor import execute
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.process_group import gather_objects
from shardwise.schedule.pipeline.times import Times

TURNS, PAUSE = 40, 0.01
"""Messages of each rank by which a hop is measured, and seconds from one to the next."""


def step(case: EmulationCase, comms: Comms, nbytes: int) -> dict[str, Any]:
    """One step on this rank: start and spans in seconds of the monotonic clock, and the most that it held."""
    worker = TimedWorker(case, comms, nbytes)
    comms.start_recording()
    comms.timeline = worker.record
    dist.barrier()
    start = time.monotonic()
    execute(case.schedule, comms, worker)
    comms.timeline = None
    comms.stop_recording()
    return {"start": start, "spans": worker.finish(), "held": worker.most_held, "buffers": worker.most_buffers}


def hop(comms: Comms, nbytes: int) -> float:
    """Seconds of a message to the next rank, the median of many, by the clock that all processes share.

    All ranks hand one over at the same moment, as in a pipeline whose stages take equally long: they share the
    host's cores. Each then stands still for the one of the rank before.
    """
    place, ranks = comms.index(PP), dist.get_world_size()
    message = torch.zeros(nbytes // WORD, dtype=torch.int64)
    arrived, seen = torch.empty_like(message), []
    clocks = gather_objects(time.monotonic())
    for turn in range(1, TURNS + 1 if ranks > 1 else 0):
        arriving = comms.receive(arrived, PP, (place - 1) % ranks, "hop")
        time.sleep(max(0.0, max(clocks) + turn * PAUSE - time.monotonic()))
        message[0] = time.monotonic_ns()
        leaving = comms.send(message, PP, (place + 1) % ranks, "hop")
        arriving.wait()
        seen.append((time.monotonic_ns() - int(arrived[0])) / 1e9)
        leaving.wait()
    return statistics.median([seconds for theirs in gather_objects(seen) for seconds in theirs] or [0.0])


def run(rank: int, job: EmulationJob) -> None:
    """All steps of all cases; rank 0 writes what every rank saw."""
    ranks = dist.get_world_size()
    # The messages of a pipeline alone.
    layout = Layout(pp=ranks)
    comms = make_comms(layout, None, rank, transport=job.transport, axes=(PP,), quiet=True, timeout=job.timeout)
    for case in job.cases:
        # Without the waits: memory for messages is made, and nothing is compiled or loaded later.
        step(replace(case, times=Times.none(case.schedule.stages)), comms, job.nbytes)
    latency = hop(comms, job.nbytes)
    results: list[list[Any]] = [[] for _ in job.cases]
    for number in range(job.steps):
        for index, case in enumerate(job.cases):
            if rank == 0:
                rewrite_line(f"{case.schedule.name}: step {number + 1} of {job.steps}")
            results[index].append(step(case, comms, job.nbytes))
    every = gather_objects(results)
    if rank == 0:
        cases = [[[theirs[index][number] for theirs in every] for number in range(job.steps)]
                 for index in range(len(job.cases))]  # fmt: skip
        job.leave({"transport": comms.backend, "hop": latency, "cases": cases})
        rewrite_line("")
    dist.barrier()  # who leaves early must not be missed
    comms.close()


if __name__ == "__main__":
    leave(main(sys.argv[1:], EmulationJob.read, run), at_once=True)
