"""Training steps of shardwise beside its peers, interleaved A B A B in one set of processes.

    python benchmarks/train_step.py [--ranks 2] [--precision fp32 bf16] [--tokens 512 4096] [--rounds 9] [--json FILE]

Prints, for each setting, medians over rounds of milliseconds and CPU seconds a step, ratios pair by pair to the peer of
the same kind, and the peak of live tensor bytes a rank. Every contender gets the same model, batch, precision, threads
and matrix-product setting.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwise.model import ModelConfig

MODEL = ModelConfig("bench", vocab=4096, hidden=384, layers=6, heads=6, kv_heads=6, ffn=1024, max_positions=2048)

PAIRS: list[tuple[str, str]] = [
    ("shardwise:zero=0", "ddp"),
    ("shardwise:zero=3", "fsdp2"),
    ("shardwise:tp", "tensor_parallel"),
    ("shardwise:single", "plain"),
]
"""(ours, the peer it is compared with)."""


def build(name: str, setting: peers.Setting) -> peers.Contender:
    kind, _, what = name.partition(":")
    if kind != "shardwise":
        contender: peers.Contender = getattr(peers, kind)(setting)
        return contender
    micro = setting.batch if what in ("tp", "single") else setting.batch // setting.ranks
    split = {"tp": f"tp={setting.ranks}", "single": "dp=1"}.get(what, f"dp={setting.ranks},{what}")
    return peers.shardwise(setting, f"{split},micro={micro}")


def rank_main(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(job["matmul"])
    dist.init_process_group("gloo", init_method=f"file://{job['store']}", rank=rank, world_size=job["ranks"])
    results: list[dict[str, Any]] = []
    for precision in job["precision"]:
        for tokens in job["tokens"]:
            seq = min(tokens, 512) // (1 if tokens > 512 else job["ranks"])
            setting = peers.Setting(MODEL, seq, tokens // seq, precision, job["ranks"])
            results.append(measure(setting, job["pairs"], job["rounds"]))
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(results))
    dist.destroy_process_group()


def measure(setting: peers.Setting, pairs: list[tuple[str, str]], rounds: int) -> dict[str, Any]:
    names = [name for pair in pairs for name in pair]
    contenders = {name: build(name, setting) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds + 2):
        for name in names:
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            contenders[name].step(index)
            dist.barrier()
            if index >= 2:  # the first steps fill caches
                times[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - used)
    rows = []
    for ours, peer in pairs:
        ratios = [b / a for a, b in zip(times[ours], times[peer], strict=True)]
        rows.append(
            {
                "ours": ours,
                "peer": contenders[peer].describe,
                "ours_ms": 1e3 * statistics.median(times[ours]),
                "peer_ms": 1e3 * statistics.median(times[peer]),
                "ours_cpu_ms": 1e3 * statistics.median(cpu[ours]),
                "peer_cpu_ms": 1e3 * statistics.median(cpu[peer]),
                "speed": statistics.median(ratios),
                "speed_min": min(ratios),
                "speed_max": max(ratios),
            }
        )
    return {"precision": setting.precision, "tokens": setting.seq * setting.batch, "ranks": setting.ranks, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--matmul", default="medium", help="float32 matrix-product precision for everyone")
    parser.add_argument("--pairs", nargs="+", help="only pairs whose first name contains one of these")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pairs = [p for p in PAIRS if not args.pairs or any(word in p[0] for word in args.pairs)]
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "store": f"{folder}/store", "out": f"{folder}/out", "ranks": args.ranks, "precision": args.precision,
            "tokens": args.tokens, "rounds": args.rounds, "matmul": args.matmul, "pairs": pairs,
        }  # fmt: skip
        mp.spawn(rank_main, (job,), nprocs=args.ranks)
        results = json.loads(Path(job["out"]).read_text())
    for result in results:
        print(f"{result['ranks']} ranks, {result['tokens']} tokens a step, {result['precision']}")
        for row in result["rows"]:
            print(
                f"  {row['ours']:<18} {row['ours_ms']:7.1f} ms   {row['peer']:<24} {row['peer_ms']:7.1f} ms   "
                f"speed {row['speed']:.2f} ({row['speed_min']:.2f} to {row['speed_max']:.2f})   "
                f"CPU {row['ours_cpu_ms']:.0f} against {row['peer_cpu_ms']:.0f} ms"
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
