"""Steps on one long sequence: two ranks with one thread each, by each kind of context parallelism, over one such rank.

    python benchmarks/context.py [--seq 32768] [--rounds 5] [--precision fp32] [--json FILE]

The contenders take turns in one pair of processes, every second round in the opposite order, after one step each that
does not count; while one rank computes alone the other waits. Printed: the median step of each, and its speed over one
rank's, round by round: median, lowest, highest. torch's own context parallelism is tried at the end; where it does not
run on CPUs, its error is printed.
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
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import train_step
from torch import Tensor

from shardwise.decoder.random import initial_values
from shardwise.layout import Layout, Mesh, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.runtime.allocator import retain_freed_memory
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.setup import AXES, local_view, make_comms
from shardwise.runtime.pipeline.step import TrainProgram
from shardwise.runtime.transport.comms import Comms

MODEL = ModelConfig(
    "long", vocab=512, hidden=256, layers=2, heads=4, kv_heads=2, head_dim=64, ffn=688, max_positions=1 << 20
)
LAYOUTS = ("", "cp=2", "cp=2,cpkind=allgather", "cp=2,cpkind=ulysses")
RANKS, SEED, LR = 2, 0, 1e-4

Step = Callable[[int], tuple[float, float] | None]


def built(text: str, seq: int, precision: str) -> Step:
    """The step of a layout: (start, end) on the ranks that take part, None on the others."""
    rank, layout = dist.get_rank(), Layout.parse(f"{text},precision={precision}".lstrip(","))
    if rank >= layout.ranks:
        return lambda index: None
    if layout.ranks == 1:
        comms = Comms(Mesh.of(layout, MODEL), rank, AXES, timeout=300)
        comms.backend = "shared"
    else:
        comms = make_comms(layout, MODEL, rank, timeout=300, transport="shared")
    plan = unit_plan(MODEL, layout, Workload(seq, 1), rank=rank, backend=comms.backend)
    config = OptimizerConfig(lr=LR)
    program = TrainProgram(plan, comms, config, lambda p, i: initial_values(p, i, SEED), torch.device("cpu"))

    def step(index: int) -> tuple[float, float]:
        tokens = torch.randint(MODEL.vocab, (1, seq + 1), generator=torch.Generator().manual_seed(index))
        pair = local_view(peers.plain_batch(tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous(), plan)
        started = time.perf_counter()
        program.step([pair], LR)
        return started, time.perf_counter()

    return step


def torch_context(seq: int) -> str:
    """What torch's context parallelism says to one attention forward and backward over two CPU ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    q, k, v = (torch.randn(1, 4, seq, 64) for _ in range(3))
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        buffers: list[Tensor] = [q, k, v]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3, no_restore_buffers=set(buffers)):
            q, k, v = (x.requires_grad_() for x in buffers)
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    except Exception as error:  # any error of a peer is a result
        return f"does not run here: {type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    return "runs"


def rank_main(rank: int, job: dict[str, Any]) -> None:
    train_step.join(rank, RANKS, job)
    retain_freed_memory()
    steps = {text: built(text, job["seq"], job["precision"]) for text in LAYOUTS}
    seconds: dict[str, list[float]] = {text: [] for text in LAYOUTS}
    for index in range(job["rounds"] + 1):
        for text in LAYOUTS if index % 2 else reversed(LAYOUTS):
            dist.barrier()
            clocks: list[Any] = [None] * RANKS
            dist.all_gather_object(clocks, steps[text](index))
            there = [clock for clock in clocks if clock]
            if index:
                seconds[text].append(max(end for _, end in there) - min(start for start, _ in there))
    peer = torch_context(1024)
    if rank == 0:
        Path(job["folder"], "out").write_text(json.dumps({"seconds": seconds, "torch": peer}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # taking gloo down while the other rank does so now and then aborts the process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = {"folder": folder, "matmul": "highest", "seq": args.seq, "rounds": args.rounds}
        mp.spawn(rank_main, (job | {"precision": args.precision},), nprocs=RANKS)
        found = json.loads(Path(folder, "out").read_text())
    one = found["seconds"][""]
    print(f"{MODEL.layers} layers, {args.seq} tokens, {args.precision}, {args.rounds} rounds, one thread a rank")
    for text, seconds in found["seconds"].items():
        ratios = [alone / mine for alone, mine in zip(one, seconds, strict=True)]
        print(
            f"{text or 'one rank':24} {1e3 * statistics.median(seconds):8.0f} ms   "
            f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(f"torch.distributed.tensor.experimental.context_parallel: {found['torch']}")
    if args.json:
        args.json.write_text(json.dumps(vars(args) | {"json": None} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
