"""The update of optimizer state on disk beside the disk's own speed: direct reads and writes of as many bytes.

    python benchmarks/nvme_update.py [--elements 67108864] [--rounds 7] [--disk DIR] [--json FILE] [--tiny]

Contenders, in turn within each round: `update`, the runtime's (`OffloadFile.update` with AdamW on one thread and bf16
gradients: 12 bytes of each element read, 12 written into the other slot); `streaming`, one thread that reads as many
bytes from one file and one that writes as many to another, 12 MiB at a time by direct I/O; and `one by one`, the same
update with reading, computing and writing one after the other. Printed: seconds (median), bytes/s both ways together,
and the speed of each beside streaming: the median over rounds, the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.file_io import memory
from shardwise.layout.homes import CHUNK, Load, StateFile
from shardwise.layout.optimizers import states_of
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.offload.file import OffloadFile
from shardwise.runtime.zero.update import update

REQUEST = 12 << 20
UNITS = 8
CONFIG = OptimizerConfig()


def updater(elements: int) -> Callable[[Load, list[Tensor]], None]:
    """AdamW of a load as the runtime does it: bf16 gradients, converted chunk by chunk."""
    gradients = torch.full((elements // UNITS,), 1e-3, dtype=torch.bfloat16)
    room, step = torch.empty(CHUNK), torch.ones(())

    def change(load: Load, arrays: list[Tensor]) -> None:
        for at in range(0, load.stop - load.start, CHUNK):
            master, first, second = (array[at : at + CHUNK] for array in arrays)
            own = room[: len(master)].copy_(gradients[load.start + at : load.start + at + len(master)])
            update("adamw", (master, own, first, second), step, CONFIG, CONFIG.lr, decay=True)

    return change


def one_by_one(file: OffloadFile, change: Callable[[Load, list[Tensor]], object]) -> None:
    """An update whose reads and writes wait for each other."""
    for load in file.layout.loads():
        file._read_load(load, 0, None)
        change(load, file._arrays(load, 0))
        file._write_load(load, 0)
    file.slot = 1 - file.slot


class Streams:
    """Two files of so many bytes, one of which is read and the other written at the same time."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._nbytes, self._buffers = nbytes, [memoryview(memory(REQUEST)) for _ in range(2)]
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        self._files = [os.open(folder / name, flags, 0o600) for name in ("read", "written")]
        for file in self._files:
            os.posix_fallocate(file, 0, nbytes)
            self._move(lambda part, at, file=file: os.pwrite(file, part, at), self._buffers[0])  # blocks that are there
        self._pool = ThreadPoolExecutor(2)

    def _move(self, call: Callable[[memoryview, int], int], buffer: memoryview) -> None:
        at = 0
        while at < self._nbytes:
            at += call(buffer[: min(REQUEST, self._nbytes - at)], at)

    def run(self) -> None:
        """Read one and write the other."""
        calls = (
            lambda part, at: os.preadv(self._files[0], [part], at),
            lambda part, at: os.pwrite(self._files[1], part, at),
        )
        for done in [self._pool.submit(self._move, call, b) for call, b in zip(calls, self._buffers, strict=True)]:
            done.result()


def measured(folder: Path, elements: int, rounds: int) -> dict[str, dict[str, float]]:
    layout = StateFile(tuple((f"unit {n}", elements // UNITS) for n in range(UNITS)), (), 4, 2, len(states_of("adamw")))
    file = OffloadFile(folder / "state", layout, torch.float32, torch.bfloat16)
    change, nbytes = updater(elements), elements * layout.arrays * 4
    streams = Streams(folder, nbytes)
    calls = {
        "streaming": streams.run,
        "update": lambda: file.update(change),
        "one by one": lambda: one_by_one(file, change),
    }
    for call in (*calls.values(), calls["update"]):  # both slots are written once
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        names = list(calls)[:: 1 if number % 2 else -1]
        for name in names:
            started = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - started)
    file.close(remove=True)
    rows = {}
    for name, took in times.items():
        ratios = [reference / own for reference, own in zip(times["streaming"], took, strict=True)]
        rows[name] = {
            "seconds": statistics.median(took),
            "bytes_per_second": 2 * nbytes / statistics.median(took),
            "of_streaming": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--disk", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a moment's work, to see that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    elements, rounds = (1 << 16, 2) if args.tiny else (args.elements, args.rounds)
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        rows = measured(Path(folder), elements, rounds)
    for name, row in rows.items():
        print(
            f"{name:<11} {row['seconds']:8.3f} s {row['bytes_per_second'] / 1e9:6.2f} GB/s  "
            f"{row['of_streaming']:.2f}x of streaming ({row['lowest']:.2f} to {row['highest']:.2f})"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"date": str(date.today()), "elements": elements, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
