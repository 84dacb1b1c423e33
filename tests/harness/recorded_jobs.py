"""Ranks that record themselves with torch: profiler, execution trace, Flight Recorder."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile


def late(rank: int, folder: Path) -> None:
    """Three steps; rank 1 comes late to the sum of 1,000 elements. Writes trace_RANK.json and et_RANK.json."""
    observer: Any = ExecutionTraceObserver()
    observer.register_callback(str(folder / f"et_{rank}.json"))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, execution_trace_observer=observer) as profiler:
        for _ in range(3):
            (torch.ones(64, 64) @ torch.ones(64, 64)).sum()
            if rank == 1:
                time.sleep(0.2)
            dist.all_reduce(torch.ones(1000))
            dist.barrier()
    profiler.export_chrome_trace(str(folder / f"trace_{rank}.json"))


def behind(rank: int, folder: Path) -> None:
    """Rank 2 does not enter the sum of 5 elements before all dumps are written: dump_rank_RANK and RANK.json."""
    recorder: Any = torch._C._distributed_c10d  # type: ignore[attr-defined]
    dist.all_reduce(torch.ones(100))
    while b"completed" not in recorder._dump_fr_trace_json():  # a thread of its own writes it
        time.sleep(0.01)
    work = dist.all_reduce(torch.ones(5), async_op=True) if rank != 2 else None
    (folder / "json").mkdir(exist_ok=True)
    (folder / "json" / f"dump_rank_{rank}.json").write_bytes(recorder._dump_fr_trace_json())
    (folder / "pickle").mkdir(exist_ok=True)
    (folder / "pickle" / f"dump_rank_{rank}").write_bytes(recorder._dump_fr_trace())
    dist.distributed_c10d._get_default_store().set(f"dumped-{rank}", "1")
    dist.distributed_c10d._get_default_store().wait([f"dumped-{other}" for other in range(dist.get_world_size())])
    if work is None:
        dist.all_reduce(torch.ones(5))
    else:
        work.wait()
