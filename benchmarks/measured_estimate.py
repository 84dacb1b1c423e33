"""`estimate --measure` beside real training: step times of 12 layouts of at most two ranks on this machine, by turns.

    python benchmarks/measured_estimate.py [--layouts WORD ...] [--rounds 9] [--seconds 45] [--json FILE]

First `calibrate device --ranks 2` measures this machine over shared memory and over gloo. Then, for each layout, its
ranks build both: the program that `train` steps (its settings, transport and thread count) and the share that `estimate
--measure` steps, whose collectives are waits. Every round makes a step of each, every second round in the opposite
order, so that a machine whose speed drifts is as fast for both.

Real: from the first rank's start to the last rank's end, with the preparation of its micro-batches. Measured: what
`estimate --measure` composes of the shares' steps. Plain: `estimate` with the calibrated cluster. The error is the
median over the rounds of measured over real, less 1; that of the plain estimate compares it with the real median. The
spread is half the distance between the quartiles of the real steps over their median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import train_step

from shardwise.cluster import Cluster
from shardwise.data import Sampler
from shardwise.decoder import random
from shardwise.decoder.random import initial_values
from shardwise.emulate.measured_step import MeasuredStep, ShareSettings, plan_shares
from shardwise.emulate.share import ShareRun
from shardwise.emulate.share_job import Share, ShareJob
from shardwise.errors import UserError
from shardwise.layout import Layout, Mesh, Workload, unit_plan
from shardwise.layout.axes import DP, REPLICA
from shardwise.layout.unit import Backend
from shardwise.model import ModelConfig
from shardwise.model.config import Experts
from shardwise.model.parameters import count
from shardwise.predict import estimate
from shardwise.runtime.allocator import retain_freed_memory
from shardwise.runtime.job.batches import Batches
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.setup import make_comms
from shardwise.runtime.pipeline.step import TrainProgram

MODEL = ModelConfig("measured", vocab=2048, hidden=256, layers=4, heads=4, kv_heads=4, ffn=704, max_positions=512)
ROUTED = MODEL.replace(name="measured-experts", experts=Experts(count=4, active=2, ffn=352))
WORKLOAD = Workload(seq=256, batch=8)
CASES: tuple[tuple[str, Backend], ...] = (
    ("dp=1,micro=4,precision=fp32", "shared"),
    ("dp=2,micro=4,precision=fp32", "shared"),
    ("dp=2,zero=1,micro=4,precision=fp32", "gloo"),
    ("dp=2,zero=2,micro=2,precision=bf16", "shared"),
    ("dp=2,zero=3,micro=4,precision=fp32", "shared"),
    ("dp=2,micro=2,recompute=full,precision=fp32", "gloo"),
    ("tp=2,micro=4,precision=bf16", "shared"),
    ("tp=2,sp,micro=4,precision=fp32", "gloo"),
    ("pp=2,micro=2,precision=fp32", "shared"),
    ("pp=2,schedule=interleaved,virtual=2,micro=2,precision=fp32", "gloo"),
    ("cp=2,micro=4,precision=fp32", "shared"),
    ("dp=2,ep=2,micro=4,precision=fp32", "shared"),
)
"""(layout, what carries its collectives)."""
WARM = 2
SEED = 0
LIMIT = 0.10
"""Mean error that is allowed where steps repeat well."""


@dataclass(frozen=True)
class Row:
    """One layout. plain: predicted seconds; real, measured: seconds of each round."""

    layout: str
    transport: str
    plain: float
    real: list[float]
    measured: list[float]
    ledger_differs: list[str]

    @property
    def error(self) -> float:
        return statistics.median(m / r for m, r in zip(self.measured, self.real, strict=True)) - 1

    @property
    def plain_error(self) -> float:
        return self.plain / statistics.median(self.real) - 1

    @property
    def spread(self) -> float:
        low, middle, high = statistics.quantiles(self.real, n=4, method="inclusive")
        return (high - low) / 2 / middle

    @property
    def allowed(self) -> float:
        return max(LIMIT, 2 * self.spread)

    def to_json(self) -> dict[str, Any]:
        medians = {"real_s": statistics.median(self.real), "measured_s": statistics.median(self.measured)}
        return vars(self) | medians | {k: getattr(self, k) for k in ("error", "plain_error", "spread", "allowed")}


# -- in every rank


class RealRun:
    """The program of one rank of a training run, over the transport that it would have."""

    def __init__(self, model: ModelConfig, layout: Layout, transport: str, steps: int) -> None:
        rank, self.config = dist.get_rank(), OptimizerConfig()
        comms = make_comms(layout, model, rank, timeout=300, transport=transport)
        plan = unit_plan(model, layout, WORKLOAD, rank=rank, backend=comms.backend)
        self.program = TrainProgram(
            plan, comms, self.config, lambda p, i: initial_values(p, i, SEED), torch.device("cpu")
        )
        tokens = np.random.default_rng(SEED).integers(0, model.vocab, steps * WORKLOAD.batch * WORKLOAD.seq + 1)
        place = Mesh.of(layout, model).index(REPLICA + DP, rank)
        self.batches = Batches(plan, Sampler(tokens, WORKLOAD.seq, SEED), place, torch.device("cpu"))

    def step(self, number: int) -> tuple[float, float, float]:
        """(start, end, CPU seconds)."""
        dist.barrier()
        started, used = time.perf_counter(), time.process_time()
        key = random.key(SEED, "dropout", number)
        self.program.step(self.batches.step(number * WORKLOAD.batch, WORKLOAD.batch, key), self.config.lr)
        return started, time.perf_counter(), time.process_time() - used


def rank_main(rank: int, job: dict[str, Any]) -> None:
    """Steps of both by turns; the first rank writes those of all."""
    ranks = job["ranks"]
    train_step.join(rank, ranks, job)
    retain_freed_memory()
    shares = ShareJob(**job["shares"])
    model, layout = ModelConfig.from_json(shares.model), Layout.parse(shares.layout)
    real, share = RealRun(model, layout, job["transport"], WARM + job["rounds"]), ShareRun(shares, rank)
    clock, steps = [], []
    for number in range(WARM + job["rounds"]):
        for of_share in (False, True) if number % 2 else (True, False):
            if of_share:
                steps.append(share.step(number))
            else:
                clock.append(real.step(number))
    mine = share.to_json(steps[WARM:])
    out = {"real": train_step.over_ranks(clock[WARM:])["seconds"], "shares": train_step.everywhere(mine)}
    if rank == 0:
        Path(job["folder"], "out").write_text(json.dumps(out))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # taking gloo down while the other rank does so now and then aborts the process


# -- rows


def calibrated(transport: str, seconds: float, folder: Path) -> Cluster:
    """This machine as `calibrate device` measures it with two ranks."""
    out = folder / f"{transport}.toml"
    command = [sys.executable, "-m", "shardwise", "calibrate", "device", "--ranks", "2", "--device", "cpu"]
    command += ["--transport", transport, "--seconds", str(seconds), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Cluster.parse(str(out))


def subject(layout: Layout) -> ModelConfig:
    """The model that a layout trains: one with experts where these are split."""
    return ROUTED if layout.ep > 1 else MODEL


def row_of(text: str, backend: Backend, cluster: Cluster, rounds: int) -> Row:
    """Measure one layout."""
    layout = Layout.parse(text)
    model, cluster = subject(layout), replace(cluster, devices_per_node=layout.ranks)
    report = estimate(model, layout, WORKLOAD, cluster, backend=backend)
    assert report.time is not None
    settings = ShareSettings("cpu", backend, "this machine", WARM, rounds)
    plan = plan_shares(model, layout, WORKLOAD, cluster, report, settings)
    (ranks,) = plan.rounds
    with tempfile.TemporaryDirectory() as folder:
        job = {"folder": folder, "ranks": len(ranks), "rounds": rounds, "matmul": "highest"}
        job |= {"transport": backend, "shares": asdict(plan.job(ranks, ""))}
        mp.spawn(rank_main, (job,), nprocs=len(ranks))
        found = json.loads(Path(folder, "out").read_text())
    shares = map(Share.from_json, found["shares"])
    step: MeasuredStep = plan.composed({share.rank: share for share in shares})
    return Row(text, backend, report.time, found["real"], list(step.repeats), list(step.ledger_differs))


HEAD = f"{'layout':<58} {'over':<7} {'real':>7} {'measured':>9} {'error':>7} {'spread':>7}   {'plain':>7} {'error':>7}"


def line(row: Row) -> str:
    real, measured = (1e3 * statistics.median(seconds) for seconds in (row.real, row.measured))
    return (
        f"{row.layout:<58} {row.transport:<7} {real:>4.0f} ms {measured:>6.0f} ms {row.error:>+7.1%} "
        f"{row.spread:>7.1%}   {1e3 * row.plain:>4.0f} ms {row.plain_error:>+7.1%}"
    )


def summary(rows: list[Row]) -> dict[str, float]:
    """Mean errors, mean spread, and the mean of what is allowed: 10%, or twice the spread."""
    return {
        "mean_abs_error": statistics.mean(abs(row.error) for row in rows),
        "mean_allowed": statistics.mean(row.allowed for row in rows),
        "mean_spread": statistics.mean(row.spread for row in rows),
        "inside": statistics.mean(abs(row.error) <= row.allowed for row in rows),
        "plain_mean_abs_error": statistics.mean(abs(row.plain_error) for row in rows),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", metavar="WORD", help="only layouts with one of these words")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each that count (%(default)s)")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each calibration (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the table, raw times, machine and date here")
    args = parser.parse_args()
    if args.rounds < 2:
        raise UserError(f"--rounds must be at least 2, not {args.rounds}")
    return args


def main() -> None:
    args, started = arguments(), time.perf_counter()
    chosen = [case for case in CASES if not args.layouts or any(word in case[0] for word in args.layouts)]
    step = f"{WORKLOAD.batch} sequences of {WORKLOAD.seq} tokens a step"
    with tempfile.TemporaryDirectory() as name:
        names = sorted({transport for _, transport in chosen}, reverse=True)
        clusters = {transport: calibrated(transport, args.seconds, Path(name)) for transport in names}
    print(f"{count(MODEL) / 1e6:.1f}M parameters, {step}\n{HEAD}", flush=True)
    rows = []
    for text, backend in chosen:
        rows.append(row_of(text, backend, clusters[backend], args.rounds))
        print(line(rows[-1]), flush=True)
    numbers = summary(rows)
    print(
        f"\nmean error {numbers['mean_abs_error']:.1%} (allowed {numbers['mean_allowed']:.1%}), mean spread "
        f"{numbers['mean_spread']:.1%}, inside {numbers['inside']:.0%}; plain estimate "
        f"{numbers['plain_mean_abs_error']:.1%}; {time.perf_counter() - started:.0f} s"
    )
    if args.json:
        about = train_step.header("measured_estimate") | {"model": MODEL.to_json(), "parameters": count(MODEL)}
        about |= {"workload": WORKLOAD.to_json(), "device": clusters[names[0]].device.source}
        train_step.write_json(args.json, about | numbers | {"rows": [row.to_json() for row in rows]})


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
