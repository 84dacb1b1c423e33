"""A rank of a certificate: `python -m shardwise.certify.rank JOB.json`."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from shardwise.certify.adapter import Adapter
from shardwise.certify.compare import Case, Meet, compare_case
from shardwise.certify.reference import Reference
from shardwise.codec import plain
from shardwise.runtime.job.rank import RankJob, leave, main

PATIENCE = 10.0
"""Seconds within which other ranks must fail, too."""


@dataclass(frozen=True, kw_only=True)
class CertifyJob(RankJob):
    """Cases for one number of ranks. Each case's cells are a line of `out`."""

    adapter: str
    cases: tuple[Case, ...]


def meeting(store: dist.Store, rank: int, world: int) -> Meet:
    """Tell texts through a store, which works when ranks wait in different collectives."""
    count = 0

    def meet(words: str) -> list[str]:
        nonlocal count
        count += 1
        store.set(f"{count}-{rank}", words or "-")
        texts = [f"{count}-{other}" for other in range(world)]
        try:
            store.wait(texts, timedelta(seconds=PATIENCE if words else 3600))
        except Exception:
            return [words, ""]
        return [text if (text := store.get(key).decode()) != "-" else "" for key in texts]

    return meet


def run(rank: int, job: CertifyJob) -> None:
    """Compare, and leave a line per case."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    folder, world = Path(job.out).parent, dist.get_world_size()
    store = dist.FileStore(str(folder / "meeting"), world)
    meet = meeting(store, rank, world)
    adapter, references = Adapter.load_from(job.adapter), dict[tuple[str, str, str], Reference]()
    for number, case in enumerate(job.cases):
        key = case.model, case.variant, case.layout if case.variant == "dropout" else ""
        if key not in references:
            references[key] = Reference(adapter, *key)
        cells = compare_case(adapter, references[key], case, folder / f"checkpoint-{number}", meet)
        if rank == 0:
            with open(job.out, "a") as file:
                file.write(json.dumps([number, plain(cells)]) + "\n")


if __name__ == "__main__":
    leave(main(sys.argv[1:], CertifyJob.read, run), at_once=True)
