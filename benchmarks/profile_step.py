"""Where the time of a step goes on rank 0: operators by kind, and what is left for Python, waiting and the rest.

    python benchmarks/profile_step.py [--layout dp=2,zero=3] [--precision fp32] [--tokens 512] [--steps 5] [--plain]
                                      [--json FILE]

--plain: a plain training loop of one rank in place of a layout of ours. Milliseconds a step of rank 0, averages over
`--steps` steps under torch's profiler, which slows a step by a few percent; its undisturbed time, the median of as many
steps, is printed beside. Page faults are the process's own count: memory that was given back and faulted in again.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from train_step import MODEL

from shardwise.layout import Layout
from shardwise.runtime.allocator import retain_freed_memory

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"),
    "attention": ("scaled_dot_product",),
    "optimizer": ("_fused_adamw", "linalg_vector_norm"),
    "copies and zeroing": ("aten::copy_", "aten::fill_", "aten::zero_"),
    "loss": ("exp_", "log_softmax", "nll_loss", "scatter_add"),
    "norms, activations, other operators": ("aten::",),
}
"""Kind -> parts of operator names; the first kind that fits has it. RMSNorm's norms count as optimizer's: both are
`linalg_vector_norm`; they are a few percent of it."""


def rank_main(rank: int, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    dist.init_process_group("gloo", init_method=f"file://{job['store']}", rank=rank, world_size=job["ranks"])
    retain_freed_memory(not job["plain"])
    tokens, ranks = job["tokens"], job["ranks"]
    seq = 512 if tokens > 512 else tokens // ranks
    setting = peers.Setting(MODEL, seq, tokens // seq, job["precision"], ranks)
    if job["plain"]:
        contender = peers.plain(setting)
    else:
        share = setting.batch // ranks if "dp=" in job["layout"] else setting.batch
        contender = peers.shardwise(setting, f"{job['layout']},micro={share}")
    found = measure(contender, job["steps"])
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(contender: peers.Contender, steps: int) -> dict[str, Any]:
    for index in range(3):
        contender.step(index)
    times, faults = [], resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for index in range(steps):
        started = time.perf_counter()
        contender.step(index)
        times.append(time.perf_counter() - started)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        started = time.perf_counter()
        for index in range(steps):
            contender.step(index)
        profiled = time.perf_counter() - started
    kinds: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        kind = next((k for k, parts in KINDS.items() if any(part in event.key for part in parts)), None)
        if kind:
            kinds[kind] += event.self_cpu_time_total / 1e3 / steps
    rest = profiled / steps * 1e3 - sum(kinds.values())
    return {
        "what": contender.describe,
        "ms": 1e3 * statistics.median(times),
        "profiled_ms": 1e3 * profiled / steps,
        "page_faults": faults / steps,
        "kinds": {**{kind: kinds[kind] for kind in KINDS}, "Python, communication, waiting": rest},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="dp=1")
    parser.add_argument("--precision", default="fp32", choices=peers.DTYPES)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ranks = 1 if args.plain else Layout.parse(args.layout).ranks
    with tempfile.TemporaryDirectory() as folder:
        job = vars(args) | {"store": f"{folder}/store", "out": f"{folder}/out", "ranks": ranks}
        mp.spawn(rank_main, (job,), nprocs=ranks)
        found = json.loads(Path(job["out"]).read_text())
    print(
        f"{found['what']}, {args.precision}, {args.tokens} tokens on {ranks} rank{'s' * (ranks > 1)}: "
        f"{found['ms']:.1f} ms a step ({found['profiled_ms']:.1f} under the profiler), "
        f"{found['page_faults']:,.0f} page faults"
    )
    for kind, ms in found["kinds"].items():
        print(f"  {kind:<36} {ms:8.1f} ms {ms / found['profiled_ms']:6.1%}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
