"""What asynchronous saving costs a run: 50 steps with a save every 10, beside 50 without, in one set of ranks.

    python benchmarks/save_async.py [--layout dp=2,zero=1,precision=fp32] [--steps 50] [--every 10] [--rounds 5]
        [--json FILE [--more]]

A round is `--steps` steps of each contender, who take turns of `--every` steps: a machine that runs 10% slower for ten
seconds, as shared ones do, would otherwise decide which contender it hits. Savers save as their turn begins; what is
written in the background is waited for at its end, and counts. Everyone comes after everyone else equally often. Two
contenders are plain steps; savers are held against the mean of both, and one against the other shows the unrest.

Prints, for saving in the background and for saving at once, the share of its tokens/s that a run keeps, and how much
more processor time it takes (all threads of all ranks): the median over all turns, each of which has one save, against
the plain turns beside it; the lowest and the highest of the rounds; and how long a save keeps training waiting.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwise.checkpoint import Checkpoint
from shardwise.decoder.random import initial_values
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.runtime.allocator import retain_freed_memory
from shardwise.runtime.checkpointing import Position, Saver
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.setup import local_view, make_comms
from shardwise.runtime.pipeline.step import TrainProgram

MODEL = ModelConfig("bench", vocab=2048, hidden=256, layers=4, heads=4, kv_heads=4, ffn=704, max_positions=512)
SEQ, BATCH = 256, 8
CONTENDERS = ("plain", "async", "sync", "plain again")
ORDERS = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
"""Turns of the contenders: over all of them, each comes right after each other one once."""


def rank_main(rank: int, job: dict[str, Any]) -> None:
    retain_freed_memory()  # as the trainer does
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    layout = Layout.parse(job["layout"])
    dist.init_process_group("gloo", init_method=f"file://{job['store']}", rank=rank, world_size=layout.ranks)
    run = _Run(layout, rank, Path(job["folder"]), job["every"])
    for saver in run.savers.values():
        run.steps(3)  # fills caches
        run.save(saver)
        saver.finish()
    rounds = [run.round(job["steps"] // job["every"]) for _ in range(job["rounds"])]
    every: list[Any] = [None] * layout.ranks
    dist.all_gather_object(every, rounds)
    if rank == 0:

        def told(name: str, what: Callable[[list[Took]], float]) -> list[list[float]]:
            """Of each round the contender's turns; what: the number of a turn, of what it took every rank."""
            each = [list(zip(*(found[number][name] for found in every), strict=True)) for number in range(len(rounds))]
            return [[what(list(ranks)) for ranks in turns] for turns in each]

        found = {
            "seconds": {name: told(name, lambda ranks: ranks[0].seconds) for name in CONTENDERS},
            "cpu_seconds": {name: told(name, lambda ranks: sum(r.cpu_seconds for r in ranks)) for name in CONTENDERS},
            "held_seconds": {name: told(name, lambda ranks: ranks[0].held_seconds) for name in run.savers},
            "checkpoint_bytes": Checkpoint.open(run.last).manifest.nbytes,
        }
        Path(job["out"]).write_text(json.dumps(found))
    dist.destroy_process_group()


class Took(NamedTuple):
    """Of one turn on one rank: seconds, the process's processor seconds, those that its save kept training waiting."""

    seconds: float
    cpu_seconds: float
    held_seconds: float


class _Run:
    def __init__(self, layout: Layout, rank: int, folder: Path, every: int) -> None:
        self.rank, self.every = rank, every
        setting = peers.Setting(MODEL, SEQ, BATCH, layout.precision, layout.dp)
        comms = make_comms(layout, MODEL, rank, timeout=300)
        self.plan = unit_plan(MODEL, layout, Workload(SEQ, BATCH), rank=rank)
        self.program = TrainProgram(
            self.plan, comms, OptimizerConfig(), lambda p, i: initial_values(p, i, 0), torch.device("cpu")
        )
        each, data = BATCH // layout.dp, rank // layout.tp
        ids, targets = peers.tokens(setting, 0, slice(data * each, (data + 1) * each))
        self.micro_batches = [
            local_view(peers.plain_batch(i.contiguous()), t.contiguous(), self.plan)
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

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.program.step(self.micro_batches, 1e-4)
            self.done += 1

    def save(self, saver: Saver) -> None:
        saver.save(Position(self.done, 0, self.done))
        self.last = saver.folder / f"step-{self.done}"

    def round(self, turns: int) -> dict[str, list[Took]]:
        """So many turns of every contender."""
        found: dict[str, list[Took]] = {name: [] for name in CONTENDERS}
        for turn in range(turns):
            for index in ORDERS[turn % len(ORDERS)]:
                found[CONTENDERS[index]].append(self.turn(self.savers.get(CONTENDERS[index])))
        return found

    def turn(self, saver: Saver | None) -> Took:
        dist.barrier()
        started, worked = time.perf_counter(), time.process_time()
        if saver is not None:
            self.save(saver)
        held = time.perf_counter() - started
        self.steps(self.every)
        if saver is not None:
            saver.finish()
        dist.barrier()
        return Took(time.perf_counter() - started, time.process_time() - worked, held)


def compared(found: dict[str, Any], name: str, tokens: int) -> dict[str, Any]:
    """What a contender keeps of the plain steps' speed, and how much of their processor time it takes. tokens: of a
    round.

    One of the plain ones is held against the other, everything else against the mean of both. kept, cpu: medians of the
    turns, each against the plain turns beside it. range: of the rounds, all of whose turns count.
    """

    def ratios(kind: str) -> tuple[list[float], list[float]]:
        plain = [found[kind]["plain"]] if name == "plain again" else [found[kind]["plain"], found[kind]["plain again"]]
        turns, rounds = [], []
        for number, mine in enumerate(found[kind][name]):
            base = [statistics.mean(beside) for beside in zip(*(each[number] for each in plain), strict=True)]
            turns += [own / other for own, other in zip(mine, base, strict=True)]
            rounds.append(sum(mine) / sum(base))
        return turns, rounds

    turns, rounds = ratios("seconds")
    cpu_turns, cpu_rounds = ratios("cpu_seconds")
    return {
        "tokens_per_s": tokens / statistics.median(map(sum, found["seconds"][name])),
        "kept": 1 / statistics.median(turns),
        "range": [1 / max(rounds), 1 / min(rounds)],
        "cpu": statistics.median(cpu_turns),
        "cpu_range": [min(cpu_rounds), max(cpu_rounds)],
    }


def joined(earlier: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The rounds of two runs of this benchmark."""
    kinds = ("seconds", "cpu_seconds", "held_seconds")
    return found | {kind: {name: earlier[kind][name] + found[kind][name] for name in found[kind]} for kind in kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="dp=2,zero=1,precision=fp32,micro=4")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (a temporary folder)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--more", action="store_true", help="count the rounds that the --json file holds already, too")
    args = parser.parse_args()
    if args.more and not args.json:
        parser.error("--more needs --json")
    folder = Path(tempfile.mkdtemp(prefix="save-async-", dir=args.folder))
    try:
        job = vars(args) | {"store": f"{folder}/store", "out": f"{folder}/out", "folder": str(folder / "checkpoints")}
        mp.spawn(rank_main, (job,), nprocs=Layout.parse(args.layout).ranks)
        found = json.loads((folder / "out").read_text())
        if args.more:
            found = joined(json.loads(args.json.read_text()), found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tokens = args.steps * SEQ * BATCH
    size = found["checkpoint_bytes"] / 1e6
    rounds = len(found["seconds"]["plain"])
    print(f"{args.layout}; {args.steps} steps, a checkpoint of {size:.0f} MB every {args.every}; {rounds} rounds")
    print(f"{'plain':<12} {tokens / statistics.median(map(sum, found['seconds']['plain'])):8,.0f} tokens/s")
    rows = {name: compared(found, name, tokens) for name in CONTENDERS[1:]}
    for name, row in rows.items():
        low, high = row["range"]
        print(
            f"{name:<12} {row['tokens_per_s']:8,.0f} tokens/s, "
            f"{row['kept']:.1%} of plain (rounds {low:.1%} to {high:.1%}), "
            f"{row['cpu'] - 1:+.1%} processor time ({row['cpu_range'][0] - 1:+.1%} to {row['cpu_range'][1] - 1:+.1%})"
        )
    for name, held in found["held_seconds"].items():
        print(f"{name:<12} a save keeps training waiting for {1000 * statistics.median(chain(*held)):.1f} ms")
    if args.json:
        args.json.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
