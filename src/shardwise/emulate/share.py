"""One rank's share of a training step on the device at hand: the real program, whose collectives are waits.

`python -m shardwise.emulate.share JOB.json` is one process of them. Those of a job begin every step together and
otherwise ignore each other: each is there as the load that the others' ranks would be.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, astuple
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.data import Sampler
from shardwise.decoder import random
from shardwise.decoder.initial import initial_values
from shardwise.emulate.share_job import ShareJob, ShareStep, ShareWait
from shardwise.layout import Layout, Mesh, Workload, unit_plan
from shardwise.layout.axes import DP, REPLICA
from shardwise.model import ModelConfig
from shardwise.report.exposure import COMPUTE
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.runtime.data.batches import Batches
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.output import rewrite_line
from shardwise.runtime.job.rank import leave, main
from shardwise.runtime.job.setup import axes_of
from shardwise.runtime.measure.timeline import TimelineRecorder
from shardwise.runtime.pipeline.step import TrainProgram
from shardwise.runtime.transport.process_group import gather_objects
from shardwise.runtime.transport.waits import HostTimer, ShareComms, device_timer

SEED = 0
PARTS = {
    "forward": "forward",
    "recompute": "recompute",
    "backward": "backward",
    "weights": "backward",
    "loss": "loss",
    "optimizer": "optimizer",
    "optimizer's": "optimizer",
}
"""First word of what a timeline says that a rank computes -> the part of the step; else "rest"."""


class PriceTable:
    """Seconds of collectives, from a job's table. nearest sizes are interpolated."""

    def __init__(self, job: ShareJob) -> None:
        self._sizes = job.sizes
        self._rows = {(op, tuple(ranks)): seconds for op, ranks, seconds in job.prices}

    def seconds(self, op: str, nbytes: int, ranks: tuple[int, ...]) -> float:
        return float(np.interp(nbytes, self._sizes, self._rows[op, ranks]))


class ShareRecorder(TimelineRecorder):
    """Timeline of one step of a share, with its waits and the ends of a pipeline's computations."""

    def __init__(self, program: TrainProgram, prices: PriceTable) -> None:
        super().__init__(program)
        self._prices = prices
        self._ends: list[Any] = []
        comms = program.comms
        self._groups = {
            comms.mesh.name(axes): comms.mesh.group(axes, comms.rank) for axes in axes_of(program.plan.model)
        }
        program.moment = lambda kept: self._ends.append(self.now())

    def share_step(self, before: float) -> ShareStep:
        """The step, once it is over. before: seconds of the preparation of its micro-batches."""
        end = self.since_start(self._end)
        parts: dict[str, float] = defaultdict(float)
        parts["rest"] = before
        began = None
        for event in self.events():
            if event["stream"] == COMPUTE:
                part = PARTS.get(event["name"].partition(" ")[0], "rest")
                parts[part] += event["duration_s"]
                if began is None and part == "forward":
                    began = event["start_s"]
        ends = tuple(self._seconds(moment) for moment in self._ends)
        return ShareStep(before + end / 1e9, dict(parts), tuple(self._waits()), began or 0.0, ends)

    def _seconds(self, moment: Any) -> float:
        return self.since_start(moment) / 1e9

    def _waits(self) -> list[ShareWait]:
        waits = []
        for flight in self._flights:
            _, op, axes, _, dtype, elements = flight.key
            if flight.waited is None or flight.back is None or op == "send":
                continue
            ranks = self._groups[axes]
            predicted = self._prices.seconds(op, elements * DTYPE_BYTES[dtype], ranks)
            waits.append(
                ShareWait(op, axes, ranks, predicted, self._seconds(flight.waited), self._seconds(flight.back))
            )
        return sorted(waits, key=lambda wait: wait.start)


class ShareRun:
    """The program of one rank of a layout, ready to step. rank: which one."""

    def __init__(self, job: ShareJob, rank: int) -> None:
        model, layout = ModelConfig.from_json(job.model), Layout.parse(job.layout)
        self.workload = Workload(**job.workload)
        self.device = torch.device("cuda", 0) if job.device == "cuda" else torch.device("cpu")
        timer = partial(HostTimer, job.background) if self.device.type == "cpu" else device_timer(self.device)
        self.prices, mesh, self.config = PriceTable(job), Mesh.of(layout, model), OptimizerConfig()
        comms = ShareComms(mesh, rank, axes_of(model), self.prices.seconds, timer, job.backend)  # type: ignore[arg-type]
        plan = unit_plan(model, layout, self.workload, rank=rank, backend=comms.backend)
        self.program = TrainProgram(
            plan, comms, self.config, lambda parameter, index: initial_values(parameter, index, SEED), self.device
        )
        steps = job.warm + job.repeats
        eos = 0 if self.workload.isolate_documents else None
        tokens = np.random.default_rng(SEED).integers(
            0, model.vocab, steps * self.workload.batch * self.workload.seq + 1
        )
        sampler = Sampler(tokens, self.workload.seq, SEED, eos=eos)
        self.batches = Batches(plan, sampler, mesh.index(REPLICA + DP, rank), self.device)

    def step(self, number: int) -> ShareStep:
        """One step, which all processes of the job begin together."""
        dist.barrier()
        started = time.perf_counter()
        batch = self.workload.batch
        micro_batches = self.batches.step(number * batch, batch, random.key(SEED, "dropout", number))
        before = time.perf_counter() - started
        recorder = ShareRecorder(self.program, self.prices)
        with recorder:
            self.program.step(micro_batches, self.config.lr)
        return recorder.share_step(before)

    def to_json(self, steps: Sequence[ShareStep]) -> dict[str, Any]:
        """Measured steps, as `Share.from_json` reads them, with the ledger of the last one."""
        ledger = [astuple(row) for row in self.program.comms.ledger()]
        return {"rank": self.program.comms.rank, "steps": [asdict(step) for step in steps], "ledger": ledger}


def run(process: int, job: ShareJob) -> None:
    """All steps of one share; the first process writes those of all."""
    torch.set_float32_matmul_precision("highest")
    if job.device == "cuda":
        torch.cuda.set_device(0)
    share, steps = ShareRun(job, job.ranks[process]), []
    total = job.warm + job.repeats
    for number in range(total):
        if process == 0:
            rewrite_line(f"ranks {', '.join(map(str, job.ranks))}: step {number + 1} of {total}")
        steps.append(share.step(number))
    every = gather_objects(share.to_json(steps[job.warm :]))
    if process == 0:
        rewrite_line("")
        name = torch.cuda.get_device_name(0) if job.device == "cuda" else ""
        job.leave({"device": name, "shares": every})
    dist.barrier()


if __name__ == "__main__":
    leave(main(sys.argv[1:], ShareJob.read, run), at_once=True)
