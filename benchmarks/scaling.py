"""Throughput of every strategy at 1, 2 and 4 ranks beside the ideal, interleaved in one set of processes.

    python benchmarks/scaling.py [--ranks 2 4] [--precision fp32 bf16] [--tokens 2048] [--strategies WORD ...]
                                 [--rounds 7] [--json FILE]

Strong scaling: the global batch is `--tokens` tokens at every rank count, each rank has a share of it. Weak scaling:
the global batch is `--tokens` times the ranks, the work of a rank stays the same (tensor-parallel ranks each compute
their share of a batch that many times larger).

Ideal = the tokens/s of one rank with one thread, times min(ranks, cores): ranks beyond the machine's cores take turns
and cannot add throughput, so 4 ranks on 2 cores can reach 2x at most. Every round trains one step of each: one rank,
then each rank count strong and weak; the share of the ideal is taken round by round, and the median, the lowest and the
highest are printed. Ranks without part in a step wait in a barrier.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import train_step
from scaling_model import step_time

from shardwise.cluster import Cluster, Device, Link
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.runtime.allocator import retain_freed_memory

PREDICTED = (1, 4, 16, 64, 256, 1024, 4096, 16384)
STRATEGIES = ("zero=0", "zero=1", "zero=2", "zero=3", "tp", "tp,sp")
SEQ = 256


@dataclass(frozen=True)
class Case:
    """One thing to step: a strategy on so many ranks, with so many tokens in the global batch."""

    kind: str
    ranks: int
    tokens: int

    @property
    def name(self) -> str:
        return self.kind if self.ranks == 1 else f"{self.kind}-{self.ranks}"

    def build(self, strategy: str, precision: str) -> peers.Contender:
        setting = peers.Setting(train_step.MODEL, SEQ, self.tokens // SEQ, precision, self.ranks)
        return train_step.build("single" if self.ranks == 1 else strategy, setting)


def cases(ranks: list[int], tokens: int) -> list[Case]:
    counts = [n for n in sorted(set(ranks)) if n > 1]
    return [
        Case("single", 1, tokens),
        *(Case("strong", n, tokens) for n in counts),
        *(Case("weak", n, n * tokens) for n in counts),
    ]


def predicted(seconds: float, tokens: int, precision: str, link: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Weak scaling beyond the machine: the share of the ideal of each strategy at `PREDICTED` ranks.

    seconds: a single rank's step of `tokens` tokens, measured. link: alpha and bandwidth between two ranks, measured.
    The curve is that of ranks as fast as this one, each behind a link like that: what splitting adds is priced by
    `scaling_model.py`, with everything hidden that can be (`best`) and with nothing hidden (`worst`).
    """
    for ranks in PREDICTED:
        one = Link(link["alpha"], link["bandwidth"], "measured in this run")
        cluster = Cluster(ranks, 1, Device("this CPU", "cpu", None, None), one, one)
        for strategy in STRATEGIES:
            tp = min(ranks, train_step.MODEL.heads) if strategy.startswith("tp") else 1
            words = [f"dp={ranks // tp}", f"tp={tp}", f"micro={tp * tokens // SEQ}", f"precision={precision}"]
            words += [f"zero={min(int(strategy[-1]), ranks - 1)}"] if strategy.startswith("zero") else []
            words += ["sp"] if strategy.endswith("sp") and tp > 1 else []
            layout = Layout.parse(",".join(words))
            plan = unit_plan(train_step.MODEL, layout, Workload(SEQ, ranks * tokens // SEQ))
            time = step_time(plan, seconds, cluster)
            yield {"strategy": strategy, "precision": precision, "ranks": ranks, "layout": str(layout),
                   "best": seconds / time.low, "worst": seconds / time.high}  # fmt: skip


def show_predicted(rows: list[dict[str, Any]], link: dict[str, float], precision: str) -> None:
    print(
        f"\npredicted share of the ideal, weak, {precision}: nothing hidden to everything hidden; links of "
        f"{link['alpha'] * 1e6:.0f} us and {link['bandwidth'] / 1e9:.2f} GB/s, as measured between two ranks"
    )
    print("".join([f"{'ranks':>8}", *(f"{strategy:>16}" for strategy in STRATEGIES)]))
    for ranks in PREDICTED:
        cells = [f"{row['worst']:.0%} to {row['best']:.0%}" for row in rows if row["ranks"] == ranks]
        print("".join([f"{ranks:>8,}", *(f"{cell:>16}" for cell in cells)]))


# -- in every rank


def rank_main(rank: int, job: dict[str, Any]) -> None:
    train_step.join(rank, job["processes"], job)
    retain_freed_memory()
    results = []
    for precision in job["precision"]:
        rows = []
        for strategy in job["strategies"]:
            rows.append(measure(strategy, precision, job))
            if rank == 0:
                print(describe(rows[-1]), flush=True)
        results += rows
    link = measure_link()
    if rank == 0:
        Path(job["folder"], "out").write_text(json.dumps({"results": results, "link": link}))
    dist.destroy_process_group()


def measure_link(times: int = 15) -> dict[str, float]:
    """Seconds a message and bytes/s between ranks 0 and 1, from their all-reduces of 1 KB and 16 MB.

    On two ranks an all-reduce of n bytes takes 2 alpha + n / bandwidth. Every rank must call this.
    """
    group = dist.new_group([0, 1])
    medians = []
    for elements in (256, 4 << 20):
        tensor, seconds = torch.zeros(elements), []
        for _ in range(times if dist.get_rank() < 2 else 0):
            dist.barrier(group)
            started = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            seconds.append(time.perf_counter() - started)
        medians.append(statistics.median(seconds) if seconds else 0.0)
    dist.barrier()
    small, large = medians
    return {"alpha": small / 2, "bandwidth": 4 * (4 << 20) / (large - small)} if large else {}


def measure(strategy: str, precision: str, job: dict[str, Any]) -> dict[str, Any]:
    """{strategy, precision, cases: name -> {ranks, tokens, seconds}, rows} of one strategy."""
    rank = dist.get_rank()
    all_cases = cases(job["ranks"], job["tokens"])
    contenders = {case: case.build(strategy, precision) for case in all_cases if rank < case.ranks}
    clocks: dict[Case, list[tuple[float, float, float]]] = {case: [] for case in all_cases}
    for index in range(job["rounds"] + train_step.WARM):
        # Every second round the other way round: what comes first may have it easier.
        for case in all_cases if index % 2 else reversed(all_cases):
            dist.barrier()
            if rank < case.ranks:
                started = time.perf_counter()
                contenders[case].step(index)
                if index >= train_step.WARM:
                    clocks[case].append((started, time.perf_counter(), 0.0))
    found = {
        case.name: {
            "ranks": case.ranks, "tokens": case.tokens, "seconds": train_step.over_ranks(clocks[case])["seconds"]
        }
        for case in all_cases
    }  # fmt: skip
    contenders.clear()
    gc.collect()
    parallel = sorted(all_cases[1:], key=lambda case: case.ranks)
    rows = [row_of(case, found, min(case.ranks, job["cores"])) for case in parallel]
    return {"strategy": strategy, "precision": precision, "cases": found, "rows": rows}


def row_of(case: Case, found: dict[str, Any], times: int) -> dict[str, Any]:
    """Tokens/s of one case, and its share of the ideal: `times` the single rank's."""
    rates = [case.tokens / s for s in found[case.name]["seconds"]]
    single = [found["single"]["tokens"] / s for s in found["single"]["seconds"]]
    shares = [rate / (one * times) for rate, one in zip(rates, single, strict=True)]
    return {
        "kind": case.kind, "ranks": case.ranks, "tokens_per_s": statistics.median(rates),
        "ideal_tokens_per_s": times * statistics.median(single), "share": statistics.median(shares),
        "share_min": min(shares), "share_max": max(shares),
    }  # fmt: skip


def describe(result: dict[str, Any]) -> str:
    single = result["cases"]["single"]
    rate = single["tokens"] / statistics.median(single["seconds"])
    lines = [f"\n{result['strategy']}, {result['precision']}: one rank {rate:,.0f} tokens/s"]
    for row in result["rows"]:
        low, high = row["share_min"], row["share_max"]
        lines.append(
            f"  {row['ranks']} ranks {row['kind']:<6} {row['tokens_per_s']:8,.0f} tokens/s, {row['share']:.0%} of the "
            f"ideal {row['ideal_tokens_per_s']:,.0f} ({low:.0%} to {high:.0%})"
        )
    return "\n".join(lines)


# -- the run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="one rank is always measured too")
    parser.add_argument("--precision", nargs="+", choices=train_step.PRECISIONS, default=list(train_step.PRECISIONS))
    parser.add_argument("--tokens", type=int, default=2048, help=f"a multiple of {SEQ} times the ranks")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), metavar="WORD",
                        help=" ".join(STRATEGIES))  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--matmul", choices=("highest", "high", "medium"), default="medium",
                        help="float32 matrix-product precision for everyone")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write raw times, rows, machine and date here")
    args = parser.parse_args()
    for n in args.ranks:
        if n < 2 or train_step.MODEL.heads % n:
            raise UserError(f"--ranks {n}: must divide the model's {train_step.MODEL.heads} heads; use 2 or 4")
        if args.tokens < 1 or args.tokens % (n * SEQ):
            raise UserError(f"--tokens {args.tokens}: {n} ranks need a multiple of {n * SEQ} tokens")
    if args.rounds < 1:
        raise UserError(f"--rounds must be a positive integer, not {args.rounds}")
    return args


def main() -> None:
    args = arguments()
    about = train_step.header("scaling")
    cores, processes = about["machine"]["cores"], max(args.ranks)
    print(f"{cores} cores: the ideal of n ranks is min(n, {cores}) times one rank's tokens/s")
    print(f"strong: {args.tokens} tokens a step at every rank count; weak: {args.tokens} a rank; sequences of {SEQ}")
    with tempfile.TemporaryDirectory() as folder:
        job = vars(args) | {"folder": folder, "processes": processes, "cores": cores}
        mp.spawn(rank_main, (job,), nprocs=processes)
        found = json.loads(Path(folder, "out").read_text())
    results, link, curve = found["results"], found["link"], []
    for precision in args.precision:
        mine = [result for result in results if result["precision"] == precision]
        seconds = statistics.median(s for result in mine for s in result["cases"]["single"]["seconds"])
        curve += list(predicted(seconds, args.tokens, precision, link))
        show_predicted([row for row in curve if row["precision"] == precision], link, precision)
    if args.json:
        about |= {
            "rounds": args.rounds,
            "matmul": args.matmul,
            "seq": SEQ,
            "tokens": args.tokens,
            "results": results,
            "link": link,
            "predicted": curve,
        }
        train_step.write_json(args.json, about)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
