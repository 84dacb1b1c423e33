"""`shardwise estimate --measure`: one rank's real share of the layout runs on the device at hand, with waits of the
predicted length in place of its collectives."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Literal

from shardwise.cli.output import progress
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.parameters import Model
from shardwise.runtime import TRANSPORTS
from shardwise.runtime.installed import require

if TYPE_CHECKING:
    from shardwise.emulate.measured_step import MeasuredStep
    from shardwise.layout.units import Backend
    from shardwise.report import StepReport

MOST_REPEATS = 1000
_OTHERS = ("compare", "dry_run", "slow", "emulate", "breakdown", "links", "verbose")
OWN = ("device", "transport", "repeats")
"""Options of a measurement alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--measure", action="store_true",
        help="run one rank's real share on the device at hand, with waits of predicted length in place of collectives; "
        "needs torch",
    )  # fmt: skip
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where it runs (auto: the cluster's kind)")
    group.add_argument("--transport", choices=TRANSPORTS, help="of CPU ranks, as in train (auto)")
    group.add_argument("--repeats", type=int, metavar="N", help="steps that count, after two that do not (5)")


def check_unused(args: argparse.Namespace) -> None:
    """Raise `UserError` for options of a measurement without --measure."""
    for name in OWN:
        if getattr(args, name) is not None:
            raise UserError(f"--{name} belongs to --measure: add it, or leave --{name} out")


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `UserError` for options that do not go with --measure."""
    for name in _OTHERS:
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} does nothing with --measure: leave it out")
    if args.repeats is not None and not 1 <= args.repeats <= MOST_REPEATS:
        raise UserError(f"--repeats {args.repeats}: give a number of steps from 1 to {MOST_REPEATS}")


def measured_report(
    args: argparse.Namespace, model: Model, layout: Layout, workload: Workload, cluster: Cluster
) -> tuple[StepReport, MeasuredStep]:
    """The layout's prediction, and the step as measured. Raises `UserError`, and `RunFailed` when a process dies."""
    check_arguments(args)
    if not isinstance(model, ModelConfig):
        raise UserError("--measure needs a model with a configuration, which a traced module has not: leave it out")
    require("--measure", "torch")
    from shardwise.cli.calibrate_device import cpu_name
    from shardwise.emulate.measured_step import REPEATS, ShareSettings, measure_step
    from shardwise.predict import estimate

    device = _device(args.device or "auto", cluster)
    backend = _backend(args.transport or "auto", cluster)
    report = estimate(model, layout, workload, cluster, backend=backend)
    settings = ShareSettings(device, backend, cpu_name() if device == "cpu" else "", repeats=args.repeats or REPEATS)
    progress(f"running shares of {model.name} under {layout}")
    try:
        return report, measure_step(model, layout, workload, cluster, report, settings)
    finally:
        progress()


def _device(wanted: str, cluster: Cluster) -> Literal["cpu", "cuda"]:
    """The device on which shares run: of the cluster's kind, or the waits would belong to other arithmetic."""
    from shardwise.runtime.measure.hardware import has_cuda

    kind = cluster.device.kind
    if wanted not in ("auto", kind):
        raise UserError(
            f"--device {wanted}: {cluster} has devices of kind {kind}, and a share runs on one of them; leave --device "
            "out, or name another --cluster"
        )
    if kind not in ("cpu", "cuda"):
        raise UserError(f"--measure runs shares on CPUs and CUDA devices, and {cluster} has others")
    if kind == "cuda" and not has_cuda():
        raise UserError(
            f"--measure runs a share on a device of {cluster}, and torch sees no CUDA device here: run it where there "
            "is one, or name a --cluster of CPUs"
        )
    return "cuda" if kind == "cuda" else "cpu"


def _backend(transport: str, cluster: Cluster) -> Backend:
    """Backend of the real run's collectives."""
    from shardwise.layout.units import usual_backend

    usual = usual_backend(cluster)
    if transport == "auto":
        return usual
    if usual == "nccl":
        raise UserError("--transport is for CPU ranks: leave it out")
    if transport == "shared" and cluster.nodes > 1:
        raise UserError(f"--transport shared is for ranks of one host, and {cluster} has {cluster.nodes}: leave it out")
    return "gloo" if transport == "gloo" else "shared"
