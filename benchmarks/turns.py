"""Contenders that train one model in turns in one set of processes, and their speeds pair by pair."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
import train_step

from shardwise.runtime.allocator import retain_freed_memory

WARM = 3
"""Untimed steps of each contender before the timed ones."""

Step = Callable[[int], float]
"""The number of a step -> its loss."""


def take_turns(steps: Mapping[str, Step], ours: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Contender -> seconds of each round, and the loss of the last. Every rank calls it.

    Every second round goes in the opposite order. A step's seconds run from the first rank's start to the last rank's
    end. `ours` keep the memory that they free, as they do in training.
    """
    results: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in steps}
    for index in range(WARM + rounds):
        for name in list(steps) if index % 2 else reversed(list(steps)):
            retain_freed_memory(name in ours)
            dist.barrier()
            started = time.perf_counter()
            results[name]["loss"] = steps[name](index)
            clocks = train_step.everywhere((started, time.perf_counter()))
            if index >= WARM:
                results[name]["seconds"].append(max(end for _, end in clocks) - min(start for start, _ in clocks))
    return results


def leave() -> None:
    """End a rank's process: taking gloo down while another rank does so now and then aborts it."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def compared(measured: dict[str, dict[str, Any]], pairs: list[tuple[str, str]], precision: str) -> list[dict[str, Any]]:
    """A row for each (ours, peer): medians, their ratio, the lowest and the highest ratio of a round."""
    found = []
    for name, peer in pairs:
        mine, other = measured[name], measured[peer]
        ratios = [b / a for a, b in zip(mine["seconds"], other["seconds"], strict=True)]
        ours_s, peer_s = statistics.median(mine["seconds"]), statistics.median(other["seconds"])
        found.append(
            {
                "ours": name, "peer": peer, "ours_s": ours_s, "peer_s": peer_s, "speed": peer_s / ours_s,
                "speed_min": min(ratios), "speed_max": max(ratios),
                "same_loss": abs(mine["loss"] / other["loss"] - 1) < train_step.SAME_LOSS[precision],
            }
        )  # fmt: skip
    return found


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    return (
        f"  {row['ours']:24} {1e3 * row['ours_s']:7.0f} ms   {row['peer']:5} {1e3 * row['peer_s']:7.0f} ms   "
        f"{row['speed']:.2f}x ({row['speed_min']:.2f} to {row['speed_max']:.2f})"
        f"{'' if row['same_loss'] else ', losses differ'}"
    )
