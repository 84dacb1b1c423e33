"""The predicted time of a step beside the measured one, for 15 layouts of the runtime on two ranks of this machine.

    shardwise calibrate device --ranks 2 --out here.toml
    python benchmarks/step_times.py here.toml [--layouts WORD ...] [--rounds 7] [--json FILE]

Each layout trains the same global batch with the trainer's own settings (AdamW, clipping, shared memory, one thread a
rank). All are built first (15 take 10 GB) and then take turns, every second round in the opposite order, so that a
machine whose speed drifts is as fast for each. A step's measured time is the median of its rounds, from the first
rank's start to the last rank's end. Predicted is what `shardwise estimate --cluster here.toml` says. Printed: both,
the error, the 80% range, and over all layouts the mean error, and Kendall's tau over the pairs whose measured times
differ by more than 10%.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import train_step

from shardwise.cluster import Cluster
from shardwise.decoder.random import initial_values
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.model.parameters import count
from shardwise.predict.step_seconds import step_seconds
from shardwise.runtime.allocator import retain_freed_memory
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.setup import local_view, make_comms
from shardwise.runtime.pipeline.step import TrainProgram

MODEL = ModelConfig("step-times", vocab=8192, hidden=512, layers=8, heads=8, kv_heads=8, ffn=1408, max_positions=512)
WORKLOAD = Workload(seq=256, batch=8)
RANKS = 2
LAYOUTS = (
    "dp=2,micro=4",
    "dp=2,micro=1",
    "dp=2,zero=1,micro=4",
    "dp=2,zero=2,micro=2",
    "dp=2,zero=3,micro=4",
    "dp=2,zero=3,micro=1",
    "tp=2,micro=4",
    "tp=2,sp,micro=2",
    "pp=2,micro=4",
    "pp=2,micro=1",
    "pp=2,schedule=gpipe,micro=2",
    "dp=2,micro=4,recompute=full",
    "cp=2,micro=4",
    "cp=2,cpkind=allgather,micro=4",
    "cp=2,cpkind=ulysses,micro=4",
)
WARM = 2
APART = 1.1
"""How much longer one of two layouts must take for their order to count."""
SEED = 0


@dataclass(frozen=True)
class Row:
    """One layout. predicted, low, high: seconds; parts: where they go; rounds: measured seconds."""

    layout: str
    predicted: float
    low: float
    high: float
    parts: dict[str, float]
    rounds: list[float]

    @property
    def measured(self) -> float:
        return statistics.median(self.rounds)

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


# -- in every rank


Step = Callable[[int], tuple[float, float, float]]
"""Trains the global batch of an index; (start, end, CPU seconds)."""


def measure(layouts: list[Layout], rounds: int) -> dict[str, list[float]]:
    """Layout -> seconds of each round."""
    steps = [_built(layout) for layout in layouts]
    clocks: list[list[tuple[float, float, float]]] = [[] for _ in layouts]
    for index in range(rounds):
        turns = list(zip(steps, clocks, strict=True))
        for step, clock in turns if index % 2 == 0 else reversed(turns):
            clock.append(step(WARM + index))
        if dist.get_rank() == 0:
            took = " ".join(f"{1e3 * (ended - started):.0f}" for started, ended, _ in (clock[-1] for clock in clocks))
            print(f"  round {index + 1} of {rounds}: {took} ms", flush=True)
    return {str(layout): train_step.over_ranks(clock)["seconds"] for layout, clock in zip(layouts, clocks, strict=True)}


def _built(layout: Layout) -> Step:
    """The step of a layout that is built here, after those that warm up."""
    rank, config = dist.get_rank(), OptimizerConfig(lr=1e-4)
    comms = make_comms(layout, MODEL, rank, timeout=300, transport="shared")
    plan = unit_plan(MODEL, layout, WORKLOAD, rank=rank, backend=comms.backend)
    program = TrainProgram(plan, comms, config, lambda p, i: initial_values(p, i, SEED), torch.device("cpu"))
    setting = peers.Setting(MODEL, WORKLOAD.seq, WORKLOAD.batch, layout.precision, RANKS)
    share = peers.data_share(setting) if layout.dp > 1 else slice(None)

    def step(index: int) -> tuple[float, float, float]:
        ids, targets = peers.tokens(setting, index, share)
        pairs = [
            local_view(peers.plain_batch(i.contiguous()), t.contiguous(), plan)
            for i, t in zip(ids.split(layout.micro), targets.split(layout.micro), strict=True)
        ]
        dist.barrier()
        started, used = time.perf_counter(), time.process_time()
        program.step(pairs, config.lr)
        return started, time.perf_counter(), time.process_time() - used

    for index in range(WARM):
        step(index)
    return step


def rank_main(rank: int, job: dict[str, Any]) -> None:
    train_step.join(rank, RANKS, job)
    retain_freed_memory()
    found = measure([Layout.parse(text) for text in job["layouts"]], job["rounds"])
    if rank == 0:
        Path(job["folder"], "out").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # taking gloo down while the other rank does so now and then aborts the process


# -- rows


def predicted(layout: Layout, cluster: Cluster) -> dict[str, Any]:
    found = step_seconds(MODEL, layout, WORKLOAD, cluster)
    return {"predicted": found.seconds, "low": found.low, "high": found.high, "parts": found.parts}


def tau(rows: list[Row]) -> tuple[float, int]:
    """Kendall's tau over the pairs whose measured times are `APART`, and how many these are."""
    signs = []
    for a, b in combinations(rows, 2):
        if max(a.measured, b.measured) > APART * min(a.measured, b.measured):
            signs.append(1 if (a.measured > b.measured) == (a.predicted > b.predicted) else -1)
    return (statistics.mean(signs) if signs else 1.0), len(signs)


def describe(rows: list[Row]) -> dict[str, float]:
    """Print the table; the figures below it."""
    print(f"\n{'layout':<44} {'predicted':>10} {'measured':>10} {'error':>7}   80% range        where it goes")
    for row in rows:
        parts = ", ".join(f"{k} {v / row.predicted:.0%}" for k, v in row.parts.items() if v > 0.01 * row.predicted)
        print(
            f"{row.layout:<44} {row.predicted * 1e3:>7.0f} ms {row.measured * 1e3:>7.0f} ms {row.error:>+7.1%}   "
            f"{row.low * 1e3:>4.0f} to {row.high * 1e3:<4.0f} ms  {parts}"
        )
    order, pairs = tau(rows)
    mean = statistics.mean(abs(row.error) for row in rows)
    inside = statistics.mean(row.low <= row.measured <= row.high for row in rows)
    print(f"\nmean error {mean:.1%}; inside the range {inside:.0%}; Kendall's tau {order:.2f} over {pairs} pairs")
    return {"mean_abs_error": mean, "inside": inside, "kendall_tau": order, "pairs": pairs}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cluster", help="file that `shardwise calibrate device --ranks 2` has written")
    parser.add_argument("--layouts", nargs="+", metavar="WORD", help="only those whose text contains one of the words")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each layout (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the table, raw times, machine and date here")
    args = parser.parse_args()
    if args.rounds < 1:
        raise UserError(f"--rounds must be a positive integer, not {args.rounds}")
    return args


def main() -> None:
    args = arguments()
    cluster = Cluster.parse(args.cluster)
    chosen = [text for text in LAYOUTS if not args.layouts or any(word in text for word in args.layouts)]
    texts = [f"{text},precision={args.precision}" for text in chosen]
    layouts = [Layout.parse(text) for text in texts]
    expected = {str(layout): predicted(layout, cluster) for layout in layouts}
    step = f"{WORKLOAD.batch} sequences of {WORKLOAD.seq} tokens a step"
    print(f"{count(MODEL) / 1e6:.1f}M parameters, {step}, {RANKS} ranks")
    with tempfile.TemporaryDirectory() as folder:
        job = {"folder": folder, "layouts": texts, "rounds": args.rounds, "matmul": "highest"}
        mp.spawn(rank_main, (job,), nprocs=RANKS)
        measured = json.loads(Path(folder, "out").read_text())
    rows = [Row(str(layout), **expected[str(layout)], rounds=measured[str(layout)]) for layout in layouts]
    figures = describe(rows)
    if args.json:
        about = train_step.header("step_times") | {"model": MODEL.to_json(), "parameters": count(MODEL)}
        told = [vars(row) | {"measured": row.measured, "error": row.error} for row in rows]
        source = {"workload": WORKLOAD.to_json(), "device": cluster.device.source, **figures, "rows": told}
        train_step.write_json(args.json, about | source)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
