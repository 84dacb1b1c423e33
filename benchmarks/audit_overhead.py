"""What the recorder of `shardwise audit` costs: steps of FSDP2 on the 125M Llama of `module_step.py`, recorded and not
recorded in turns in the same processes.

    python benchmarks/audit_overhead.py [--tokens N] [--rounds N] [--tiny]

Prints the medians, their ratio, the lowest and highest ratio of a round, and the median ratio: of seconds, and of the
processor's seconds in rank 0, which a loaded machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import module_step
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import train_step
import turns

from shardwise.audit.recorder import Recorder

WARM = 2


class Switch:
    """Has the recorder in the process, or not."""

    def __init__(self, folder: str) -> None:
        self.recorder = Recorder(torch, dist.distributed_c10d, folder)
        self.plain = (dist.Work.wait, torch.autograd._engine_run_backward)
        self.hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
        self.recorder.install()
        self.recorded = (dist.Work.wait, torch.autograd._engine_run_backward)
        self.registered = dict(self.hooks)
        self.on = True

    def turn(self, on: bool) -> None:
        if on == self.on:
            return
        self.on = on
        dist.Work.wait, torch.autograd._engine_run_backward = self.recorded if on else self.plain
        self.hooks.clear()
        if on:
            self.hooks.update(self.registered)
            self.recorder.intercept()
        else:
            self.recorder.library._destroy()


def rank_main(rank: int, job: dict[str, Any]) -> None:
    train_step.join(rank, module_step.RANKS, job)
    step = module_step.theirs(job["sizes"], "fp32", job["tokens"])
    switch = Switch(job["folder"])
    seconds: dict[bool, list[float]] = {True: [], False: []}
    processor: dict[bool, list[float]] = {True: [], False: []}
    for index in range(WARM + job["rounds"]):
        for on in (True, False) if index % 2 else (False, True):
            switch.turn(on)
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            step(index)
            used = time.process_time() - used
            clocks = train_step.everywhere((started, time.perf_counter()))
            if index >= WARM:
                processor[on].append(used)
                seconds[on].append(max(end for _, end in clocks) - min(start for start, _ in clocks))
    if rank == 0:
        _print("seconds", seconds)
        _print("processor's seconds", processor)
        size = next(Path(job["folder"]).glob("0-*.jsonl")).stat().st_size
        print(f"{size} bytes of recording for {WARM + job['rounds']} recorded steps")
    turns.leave()


def _print(name: str, seconds: dict[bool, list[float]]) -> None:
    ratios = sorted(a / b for a, b in zip(seconds[True], seconds[False], strict=True))
    on, off = statistics.median(seconds[True]), statistics.median(seconds[False])
    print(f"{name}: recorded {on * 1e3:.1f} ms, not recorded {off * 1e3:.1f} ms: {on / off:.4f}; ratios of rounds "
          f"{ratios[0]:.3f} to {ratios[-1]:.3f}, median {statistics.median(ratios):.4f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    sizes = module_step.SIZES | (module_step.TINY if args.tiny else {})
    with tempfile.TemporaryDirectory() as folder:
        job = {"folder": folder, "matmul": "highest", "sizes": sizes, "tokens": args.tokens, "rounds": args.rounds}
        mp.spawn(rank_main, (job,), nprocs=module_step.RANKS)


if __name__ == "__main__":
    main()
