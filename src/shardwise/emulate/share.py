"""One rank's share of a training step on the device at hand: the real program, whose collectives are waits.

`python -m shardwise.emulate.share JOB.json` is one process of them. Those of a job begin every step together and do not
communicate in it: each is the load on cores and memory that another rank would be. Where all stages of a pipeline run,
each idles when the schedule's simulation, with the times of the step before, has it idle.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.data import Sampler
from shardwise.decoder import random
from shardwise.decoder.random import initial_values
from shardwise.emulate.share_composition import StageTimes, simulated, stage_times
from shardwise.emulate.share_job import ShareJob, ShareStep, ShareWait
from shardwise.layout import Layout, Mesh, Workload, unit_plan
from shardwise.layout.axes import DP, PP, REPLICA
from shardwise.model import ModelConfig
from shardwise.report.exposure import COMPUTE as COMPUTING
from shardwise.report.exposure import WAITING
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.runtime.job.batches import Batches
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.output import rewrite_line
from shardwise.runtime.job.rank import leave, main
from shardwise.runtime.job.setup import axes_of, cuda_device
from shardwise.runtime.measure.timeline import TimelineRecorder
from shardwise.runtime.pipeline.step import TrainProgram
from shardwise.runtime.tensor.lowering import vocabulary_range
from shardwise.runtime.transport.process_group import gather_objects
from shardwise.runtime.transport.waits import HostTimer, ShareComms, device_timer, wait_until
from shardwise.schedule.pipeline.action import COMPUTE

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


class MicroBatches(list[Any]):
    """Micro-batches of a step. first: called when the first of them is about to be computed."""

    def __init__(self, batches: Iterable[Any], first: Callable[[], object]) -> None:
        super().__init__(batches)
        self._first: Callable[[], object] | None = first

    def __getitem__(self, index: Any) -> Any:
        if self._first is not None:
            self._first()
            self._first = None
        return super().__getitem__(index)


class ShareRecorder(TimelineRecorder):
    """Timeline of one step of a share, with its waits and the computations of a pipeline.

    pace: earliest start of each computation in seconds since the step began; empty where there is nothing to hold.
    """

    def __init__(self, program: TrainProgram, prices: PriceTable, pace: Sequence[float] = ()) -> None:
        super().__init__(program)
        self._prices, self._pace = prices, pace
        self._starts: list[Any] = []
        self._ready: Any = None
        self._ends: list[Any] = []
        comms = program.comms
        self._groups = {
            comms.mesh.name(axes): comms.mesh.group(axes, comms.rank) for axes in axes_of(program.plan.model)
        }
        if program.plan.pipeline.schedule is not None:
            program.after_compute = self._computed

    def start(self) -> None:
        """The next computation of the pipeline starts, as soon as its pace allows."""
        index = len(self._starts)
        if not index:
            self._ready = self.now()
        if index < len(self._pace):
            self.mark(WAITING, "for other stages")
            wait_until(self._began / 1e9 + self._pace[index])
            self.resume()
        self._starts.append(self.now())

    def _computed(self, kept: Sequence[Any]) -> None:
        self._ends.append(self.now())
        self.start()

    def share_step(self, before: float) -> ShareStep:
        """The step, once it is over. before: seconds of the preparation of its micro-batches."""
        end = self.since_start(self._end)
        parts: dict[str, float] = defaultdict(float)
        parts["rest"] = before
        for event in self.events():
            if event["stream"] == COMPUTING:
                parts[PARTS.get(event["name"].partition(" ")[0], "rest")] += event["duration_s"]
        began = 0.0 if self._ready is None else self._seconds(self._ready)
        moments = zip(self._starts, self._ends, strict=False)  # after the last computation none starts
        spans = tuple((self._seconds(start), self._seconds(stop)) for start, stop in moments)
        return ShareStep(before + end / 1e9, dict(parts), tuple(self._waits()), began, spans)

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
        self.device = cuda_device(0) if job.device == "cuda" else torch.device("cpu")
        timer = partial(HostTimer, job.background) if self.device.type == "cpu" else device_timer(self.device)
        self.prices, mesh, self.config = PriceTable(job), Mesh.of(layout, model), OptimizerConfig()
        comms = ShareComms(mesh, rank, axes_of(model), self.prices.seconds, timer, job.backend)  # type: ignore[arg-type]
        plan = unit_plan(model, layout, self.workload, rank=rank, backend=comms.backend)
        self.program = TrainProgram(
            plan, comms, self.config, lambda parameter, index: initial_values(parameter, index, SEED), self.device
        )
        first, end = vocabulary_range(plan)
        if first >= end:  # a part that is padding alone
            first, end = 0, model.vocab
        # Of other ids this rank has no embedding: rows of zeros, whose gradients grow from block to block to infinity.
        count = (job.warm + job.repeats) * self.workload.batch * self.workload.seq + 1
        tokens = np.random.default_rng(SEED).integers(first, end, count)
        sampler = Sampler(tokens, self.workload.seq, SEED, eos=first if self.workload.isolate_documents else None)
        self.batches = Batches(plan, sampler, mesh.index(REPLICA + DP, rank), self.device)
        self.message = job.message
        places = {mesh.index(PP, other) for other in job.ranks}
        self.paced = layout.pp > 1 and len(places) == layout.pp
        """Whether all stages run at once: each then idles when it would in the real run, which leaves the others the
        memory's bandwidth."""
        self.pace: tuple[float, ...] = ()

    def step(self, number: int) -> ShareStep:
        """One step, which all processes of the job begin together."""
        dist.barrier()
        started = time.perf_counter()
        batch = self.workload.batch
        micro_batches = self.batches.step(number * batch, batch, random.key(SEED, "dropout", number))
        before = time.perf_counter() - started
        recorder = ShareRecorder(self.program, self.prices, self.pace)
        if self.program.plan.pipeline.schedule is not None:
            micro_batches = MicroBatches(micro_batches, recorder.start)
        with recorder:
            self.program.step(micro_batches, self.config.lr)
        step = recorder.share_step(before)
        if self.paced:
            self.pace = self._next_pace(step)
        return step

    def _next_pace(self, step: ShareStep) -> tuple[float, ...]:
        """Start of each computation in the next step: as the schedule has them with this step's times of all stages."""
        plan = self.program.plan
        times: dict[int, StageTimes] = {}
        every = gather_objects((step.began, stage_times(plan, step)))
        for _, of_rank in every:
            times |= of_rank
        assert plan.pipeline.schedule is not None
        spans = simulated(plan.pipeline.schedule, times, self.message, overlap=False).computing[plan.pp_rank]
        actions = [action for action in plan.pipeline.actions if action.kind in COMPUTE]
        began, starts = max(began for began, _ in every), []
        for action, (start, _) in zip(actions, spans, strict=True):
            starts += [began + start, *[0.0] * (len(list(action.leaves())) - 1)]
        return tuple(starts)

    def to_json(self, steps: Sequence[ShareStep]) -> dict[str, Any]:
        """Measured steps, as `Share.from_json` reads them, with the ledger of the last one."""
        ledger = [astuple(row) for row in self.program.comms.ledger()]
        return {"rank": self.program.comms.rank, "steps": [asdict(step) for step in steps], "ledger": ledger}


def run(process: int, job: ShareJob) -> None:
    """All steps of one share; the first process writes those of all."""
    torch.set_float32_matmul_precision("highest")
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
