"""Options of the engine, which `generate` and `serve` have alike: the job that they describe, and whether it fits."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import UserError
from shardwise.runtime import TRANSPORTS
from shardwise.runtime.job.config import MOST_THREADS

if TYPE_CHECKING:
    from shardwise.predict.memory.serving import MemoryFit
    from shardwise.serving.job import ServingJob


LONGEST_HANG = 1e9
"""Seconds that ranks can wait for each other."""


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Options of the engine itself."""
    group = parser.add_argument_group("the engine")
    group.add_argument("--layout", metavar="TEXT", default="", help="how it is split: tp=2, pp=2, dp=2,zero=3 (dp=1)")
    group.add_argument("--precision", choices=("bf16", "fp32", "fp64"), help="in place of the layout's (bf16)")
    group.add_argument("--int8", action="store_true", help="keep matrices in 8 bits")
    group.add_argument("--context", type=int, default=0, metavar="N", help="tokens of the longest sequence (the "
                       "model's, at most 4,096)")  # fmt: skip
    group.add_argument("--cache", metavar="SIZE", help="of keys and values on each rank, such as 1GiB (as batch and "
                       "context need)")  # fmt: skip
    group.add_argument("--batch", type=int, metavar="N", help="sequences at a time on each replica (8)")
    group.add_argument("--chunk", type=int, metavar="N", help="tokens of prompts in a turn (256)")
    group.add_argument("--no-reuse", action="store_true", help="compute equal beginnings of prompts again")
    group.add_argument("--same", action="store_true", help="under zero=3: all ranks compute all prompts")
    group.add_argument("--transport", choices=TRANSPORTS, default="auto", help="what carries "
                       "collectives between CPU ranks (auto)")  # fmt: skip
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where ranks compute (cpu)")
    group.add_argument("--threads", type=int, default=1, metavar="N", help="of each rank's matrix products (1)")
    group.add_argument("--hang", type=float, default=60.0, metavar="S", help="seconds without progress after which to "
                       "give up (60)")  # fmt: skip


def job_of(args: argparse.Namespace, report: str | None = None) -> ServingJob:
    """The engine that the arguments of `add_engine`, and `args.model`, describe. Raises `UserError`."""
    from dataclasses import replace

    from shardwise.cli.quantities import bytes_of
    from shardwise.layout import Layout
    from shardwise.predict.memory.serving import CHUNK, PAGE, largest_page_bytes
    from shardwise.predict.serving_layout import check_generation
    from shardwise.serving.job import BATCH, ServingJob, weights_in

    if not 0 < args.hang <= LONGEST_HANG:
        raise UserError(f"--hang must be a positive number of seconds, at most {LONGEST_HANG:g}, not {args.hang:g}")
    if args.threads > MOST_THREADS:
        raise UserError(f"--threads must be at most {MOST_THREADS:,}, not {args.threads:,}")
    layout = Layout.parse(args.layout)
    if args.precision:
        layout = replace(layout, precision=args.precision)
    folder = Path(args.model).absolute()
    model, _ = weights_in(folder)
    check_generation(layout, model)
    pages = 0
    if args.cache is not None:
        page = largest_page_bytes(model, layout)
        pages = bytes_of("--cache", args.cache) // page
        if not pages:
            raise UserError(f"--cache {args.cache} holds no page: one takes {page:,} bytes")
    return ServingJob(
        model, layout, str(folder), context=args.context, page=PAGE, pages=pages,
        chunk=CHUNK if args.chunk is None else args.chunk, batch=BATCH if args.batch is None else args.batch,
        reuse=not args.no_reuse, prompts="same" if args.same else "own", quantize="int8" if args.int8 else "none",
        transport=args.transport, threads=args.threads, device=args.device, hang=args.hang, report=report,
    )  # fmt: skip


def fit_of(job: ServingJob) -> MemoryFit:
    """Whether weights and cache fit, before anything is loaded."""
    from shardwise.cluster.catalog import lookup
    from shardwise.predict.memory.serving import RESERVED_CUDA, ServingSetup, fit_on_host, serving_fit

    served = ServingSetup(job.context, job.batch, job.page, job.chunk, job.quantize == "int8", cache=job.pages)
    if job.device == "cpu":
        return fit_on_host(job.model, job.layout, served, lookup("CPU").device.memory_bytes)
    devices = _cuda_memory()
    if not devices:
        return serving_fit(job.model, job.layout, served)
    sharing = -(-job.layout.ranks // len(devices))
    return serving_fit(job.model, job.layout, served, (min(devices) - RESERVED_CUDA) / sharing)


def _cuda_memory() -> list[int]:
    """Bytes of each visible device; none where `nvidia-smi` cannot tell. torch would take a second to ask."""
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        asked += ["-i", visible]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
        return [int(line) << 20 for line in said.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
