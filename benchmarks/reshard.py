"""Resharding a large checkpoint from 8 ranks to 3, beside a plain copy of it on the same disk.

    python benchmarks/reshard.py [--gigabytes 4] [--rounds 3] [--folder DIR]

Prints for each round the seconds of `cp -r` and `sync`, those of the resharding (which syncs its files itself), the
ratio of speeds, and the largest resident memory of the resharding process.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardwise.checkpoint import (
    Checkpoint,
    LocalInterval,
    Manifest,
    PartEntry,
    TensorSpec,
    commit,
    reshard,
    write_part,
    writes,
)
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.model.parameters import count

FROM, TO = Layout.parse("dp=8,zero=3"), Layout.parse("dp=3,zero=1")
KINDS = ("model", "first", "second")


def model_of(gigabytes: float) -> ModelConfig:
    """A Llama-style model whose weights and two moments in fp32 take about so many gigabytes."""
    model = ModelConfig("reshard", vocab=32000, hidden=1024, layers=1, heads=16, ffn=2816, max_positions=2048)
    block = count(model.replace(layers=2)) - count(model)
    return model.replace(layers=max(1, round((gigabytes * 1e9 / 12 - count(model)) / block) + 1))


def make(folder: Path, model: ModelConfig) -> None:
    """A checkpoint of random numbers, as 8 ranks would have written it."""
    noise = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32)

    def arrays(held: tuple[LocalInterval, ...]) -> Iterator[np.ndarray]:
        for _ in KINDS:
            for each in held:
                yield np.resize(noise, each.stored.numel)

    records = []
    for rank in range(FROM.ranks):
        held = writes(model, FROM, rank)
        entries = [
            PartEntry(f"{k}/{h.name}", TensorSpec(shape=h.shape, dtype="float32"), h.stored)
            for k in KINDS
            for h in held
        ]
        records.append(write_part(folder, rank, entries, arrays(held)))
    about = {"model": model.to_json(), "layout": str(FROM)}
    commit(folder, Manifest.of(records, step=1, samples=1, seed=0, optimizer_steps=1, about=about))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the files go (a temporary folder)")
    parser.add_argument("--reshard", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reshard:
        reshard(Checkpoint.open(args.reshard[0]), args.reshard[1], TO)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        source, copy, target = (Path(temporary, name) for name in ("step-1", "copy", "resharded"))
        make(source, model_of(args.gigabytes))
        size = sum(file.stat().st_size for file in source.iterdir())
        print(f"{size / 1e9:.2f} GB, {FROM} to {TO}")
        ratios = []
        for _ in range(args.rounds):
            started = time.perf_counter()
            subprocess.run(["cp", "-r", source, copy], check=True)
            subprocess.run(["sync"], check=True)
            copied = time.perf_counter() - started
            shutil.rmtree(copy)
            started = time.perf_counter()
            command = [sys.executable, __file__, "--reshard", source, target]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            resharded = time.perf_counter() - started
            shutil.rmtree(target)
            ratios.append(copied / resharded)
            print(f"cp and sync {copied:.1f} s   reshard {resharded:.1f} s   speed {ratios[-1]:.0%} of the copy's   "
                  f"peak memory {float(done.stdout):.0f} MB")  # fmt: skip
        print(f"median {statistics.median(ratios):.0%}")


if __name__ == "__main__":
    main()
