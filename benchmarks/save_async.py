"""What asynchronous saving costs a run: 50 steps with a save every 10, and 50 without, interleaved in one set of ranks.

    python benchmarks/save_async.py [--layout dp=2,zero=1,precision=fp32] [--steps 50] [--every 10] [--rounds 5]

Each contender trains `--steps` steps a round; the last save's end is waited for and counts. A round begins and ends
with plain steps, whose mean is what savers are held against: what the machine does slowly, such as growing hot, falls
out. Prints, for saving in the background and for saving at once, the share of its tokens/s that a run keeps, and how
much more processor time it takes (all threads of all ranks): medians over rounds of the ratios, with the lowest and the
highest. The plain steps at a round's end against those at its beginning show the machine's unrest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwise.checkpoint import Checkpoint
from shardwise.decoder.initial import initial_values
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.runtime.checkpointing import Position, Saver
from shardwise.runtime.config import OptimizerConfig
from shardwise.runtime.heap import keep_freed_memory
from shardwise.runtime.setup import make_comms, stream_view
from shardwise.runtime.step import Program

MODEL = ModelConfig("bench", vocab=2048, hidden=256, layers=4, heads=4, kv_heads=4, ffn=704, max_positions=512)
SEQ, BATCH = 256, 8
CONTENDERS = ("plain", "async", "sync", "plain again")


def rank_main(rank: int, job: dict[str, Any]) -> None:
    keep_freed_memory()  # as the trainer does
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    layout = Layout.parse(job["layout"])
    dist.init_process_group("gloo", init_method=f"file://{job['store']}", rank=rank, world_size=layout.ranks)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    run = _Run(layout, rank, Path(job["folder"]), job["every"])
    run.steps(3)  # fills caches
    for number in range(job["rounds"]):
        # Every second round the other way round: what comes first may have it easier.
        for name in CONTENDERS if number % 2 == 0 else CONTENDERS[::-1]:
            seconds[name].append(run.round(job["steps"], name))
    every: list[Any] = [None] * layout.ranks
    dist.all_gather_object(every, seconds)
    if rank == 0:
        found = {
            "seconds": {name: [wall for wall, _ in seconds[name]] for name in CONTENDERS},
            "cpu_seconds": {
                name: [sum(cpu for _, cpu in ranks) for ranks in zip(*(one[name] for one in every), strict=True)]
                for name in CONTENDERS
            },
            "checkpoint_bytes": Checkpoint.open(run.last).manifest.nbytes,
        }
        Path(job["out"]).write_text(json.dumps(found))
    dist.destroy_process_group()


class _Run:
    def __init__(self, layout: Layout, rank: int, folder: Path, every: int) -> None:
        self.rank, self.every = rank, every
        setting = peers.Setting(MODEL, SEQ, BATCH, layout.precision, layout.dp)
        comms = make_comms(layout, MODEL, rank, timeout=300)
        self.plan = unit_plan(MODEL, layout, Workload(SEQ, BATCH), rank=rank)
        self.program = Program(
            self.plan, comms, OptimizerConfig(), lambda p, i: initial_values(p, i, 0), torch.device("cpu")
        )
        each, data = BATCH // layout.dp, rank // layout.tp
        ids, targets = peers.tokens(setting, 0, slice(data * each, (data + 1) * each))
        self.micro_batches = [
            (stream_view(peers.plain_batch(i.contiguous()), layout, self.plan.tp_rank), t.contiguous())
            for i, t in zip(ids.split(layout.micro), targets.split(layout.micro), strict=True)
        ]
        self.savers = {
            name: Saver(
                self.program, folder / name, seed=0, about={}, keep=2, later=name == "async", timeout=300.0
            )
            for name in ("async", "sync")
        }  # fmt: skip
        self.done = 0
        self.last = folder

    def steps(self, count: int, saver: Saver | None = None) -> None:
        for _ in range(count):
            self.program.step(self.micro_batches, 1e-4)
            self.done += 1
            if saver is not None and self.done % self.every == 0:
                saver.save(Position(self.done, 0, self.done))
                self.last = saver.folder / f"step-{self.done}"

    def round(self, steps: int, name: str) -> tuple[float, float]:
        """(seconds, this process's processor seconds) of `steps` steps under a contender's name."""
        saver = self.savers.get(name)
        self.done += -self.done % self.every
        dist.barrier()
        started, worked = time.perf_counter(), time.process_time()
        self.steps(steps, saver)
        if saver is not None:
            saver.finish()
        dist.barrier()
        return time.perf_counter() - started, time.process_time() - worked


def compared(found: dict[str, Any], name: str, tokens: int) -> dict[str, Any]:
    """What a contender keeps of the plain steps' speed, and how much of their processor time it takes."""

    def ratios(kind: str) -> list[float]:
        first, last, mine = (found[kind][each] for each in ("plain", "plain again", name))
        # The last plain steps are held against the first, everything else against the mean of both.
        base = first if name == "plain again" else [(a + b) / 2 for a, b in zip(first, last, strict=True)]
        return [own / plain for own, plain in zip(mine, base, strict=True)]

    kept, cpu = [1 / ratio for ratio in ratios("seconds")], ratios("cpu_seconds")
    return {
        "tokens_per_s": tokens / statistics.median(found["seconds"][name]),
        "kept": statistics.median(kept),
        "range": [min(kept), max(kept)],
        "cpu": statistics.median(cpu),
        "cpu_range": [min(cpu), max(cpu)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="dp=2,zero=1,precision=fp32,micro=4")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (a temporary folder)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="save-async-", dir=args.folder))
    try:
        job = vars(args) | {"store": f"{folder}/store", "out": f"{folder}/out", "folder": str(folder / "checkpoints")}
        mp.spawn(rank_main, (job,), nprocs=Layout.parse(args.layout).ranks)
        found = json.loads((folder / "out").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tokens = args.steps * SEQ * BATCH
    size = found["checkpoint_bytes"] / 1e6
    print(f"{args.layout}; {args.steps} steps, a checkpoint of {size:.0f} MB every {args.every}")
    print(f"{'plain':<12} {tokens / statistics.median(found['seconds']['plain']):8,.0f} tokens/s")
    rows = {name: compared(found, name, tokens) for name in CONTENDERS[1:]}
    for name, row in rows.items():
        low, high = row["range"]
        print(
            f"{name:<12} {row['tokens_per_s']:8,.0f} tokens/s, {row['kept']:.1%} of plain ({low:.1%} to {high:.1%}), "
            f"{row['cpu'] - 1:+.1%} processor time ({row['cpu_range'][0] - 1:+.1%} to {row['cpu_range'][1] - 1:+.1%})"
        )
    if args.json:
        args.json.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
