"""`shardwise estimate --measure`: one rank's real share of the layout runs on the device at hand, with waits of the
predicted length in place of its collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardwise import predict
from shardwise.cli.declare import CommandOptions, arg
from shardwise.cli.output import progress
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.parameters import Model
from shardwise.records import dataclass
from shardwise.runtime import TRANSPORTS
from shardwise.runtime.installed import require

if TYPE_CHECKING:
    from shardwise.emulate.measured_step import MeasuredStep
    from shardwise.layout.unit import Backend
    from shardwise.report import StepReport


@dataclass
class MeasureOptions(CommandOptions):
    """Options of a measurement."""

    title = "measuring"
    measure: bool = arg(
        "run one rank's real share on the device at hand, with waits of predicted length in place of collectives; "
        "needs torch",
        excludes="compare dry_run slow emulate breakdown links verbose engine precision recompute_modules "
        "recompute_layers",
        missing="belongs to --measure: add it, or leave {} out",
    )
    device: str | None = arg(
        "where it runs (auto: the cluster's kind)", choices=("auto", "cpu", "cuda"), needs="measure"
    )
    transport: str | None = arg("of CPU ranks, as in train (auto)", choices=TRANSPORTS, needs="measure")
    repeats: int | None = arg("steps that count, after two that do not (5)", "N", needs="measure", least=1, most=1000)


def measured_report(
    args: MeasureOptions, model: Model, layout: Layout, workload: Workload, cluster: Cluster
) -> tuple[StepReport, MeasuredStep]:
    """The layout's prediction, and the step as measured. Raises `UserError`, and `RunFailed` when a process dies."""
    if not isinstance(model, ModelConfig):
        raise UserError("--measure needs a model with a configuration, which a traced module has not: leave it out")
    require("--measure", "torch")
    from shardwise.cli.calibrate_device import cpu_name
    from shardwise.emulate.measured_step import REPEATS, ShareSettings, measure_step

    device = _device(args.device or "auto", cluster)
    backend = _backend(args.transport or "auto", cluster)
    report = predict.estimate(model, layout, workload, cluster, backend=backend)
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
    from shardwise.layout.units import usual_backend

    usual = usual_backend(cluster)
    if transport == "auto":
        return usual
    if usual == "nccl":
        raise UserError("--transport is for CPU ranks: leave it out")
    if transport == "shared" and cluster.nodes > 1:
        raise UserError(f"--transport shared is for ranks of one host, and {cluster} has {cluster.nodes}: leave it out")
    return "gloo" if transport == "gloo" else "shared"
