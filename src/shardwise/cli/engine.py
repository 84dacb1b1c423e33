"""Engine options of `generate` and `serve`: the job that they describe, and whether it fits."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.declare import CommandOptions, arg, borrow, given
from shardwise.cli.quantities import bytes_of
from shardwise.cluster.catalog import lookup
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.layout.serving import check_generation
from shardwise.predict.memory.capacity import RESERVED_BYTES
from shardwise.records import dataclass
from shardwise.serving.job import ServingJob, weights_in

if TYPE_CHECKING:
    from shardwise.predict.memory.serving import MemoryFit


@dataclass
class ServingOptions(CommandOptions):
    """The engine that serves a folder of weights."""

    title = "the engine"
    borrowed = borrow((ServingJob, "quantize context batch chunk reuse prompts transport device threads hang"))
    layout: str = arg("how it is split: tp=2, pp=2, dp=2,zero=3 (dp=1)", "TEXT", "")
    precision: str | None = arg("in place of the layout's (bf16)", choices=("bf16", "fp32", "fp64"))
    cache: int | None = arg(
        "of keys and values on each rank, such as 1GiB (as batch and context need)", "SIZE", read=bytes_of
    )


def job_of(args: ServingOptions, report: str | None = None) -> ServingJob:
    """The engine that the options describe. Raises `UserError`."""
    from shardwise.predict.memory.serving import largest_page_bytes

    layout = Layout.parse(args.layout)
    if args.precision:
        layout = replace(layout, precision=args.precision)
    folder = Path(args.model).absolute()
    model, _ = weights_in(folder)
    check_generation(layout, model)
    options = given(args, ServingJob) | {"report": report}
    if args.cache is not None:
        page = largest_page_bytes(model, layout)
        options["pages"] = args.cache // page
        if not options["pages"]:
            raise UserError(f"--cache holds no page: one takes {page:,} bytes, not {args.cache:,}")
    job = ServingJob(model, layout, str(folder), **options)
    if model.counted is None:
        return job
    from shardwise.serving.class_engine import planned

    return planned(job)


def fit_of(job: ServingJob) -> MemoryFit:
    """Whether weights and cache fit, before anything is loaded."""
    from shardwise.predict.memory import serving

    served = job.setup
    if job.device == "cpu":
        return serving.fit_on_host(job.model, job.layout, served, lookup("CPU").device.memory_bytes)
    devices = cuda_memory()
    if not devices:
        return serving.serving_fit(job.model, job.layout, served)
    sharing = -(-job.layout.ranks // len(devices))
    return serving.serving_fit(job.model, job.layout, served, (min(devices) - RESERVED_BYTES) / sharing)


def cuda_memory() -> list[int]:
    """Bytes of each visible device; none where `nvidia-smi` cannot tell. torch would take a second to ask."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return [int(line) << 20 for line in said.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
