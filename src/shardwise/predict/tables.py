"""Output of `estimate` beside memory and ledger: the balance of attention, kinds of tensor parallelism, and time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.cluster import Cluster
from shardwise.report import StepReport
from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.timing_table import step_lines
from shardwise.report.units import format_bytes, format_time

if TYPE_CHECKING:
    from shardwise.predict.node_bytes import NodeBytes
    from shardwise.predict.tensor_kinds import TensorKind


def balance_lines(report: StepReport) -> list[str]:
    """The work of the busiest rank over the mean, beside a plain cut's; nothing without context parallelism."""
    if report.balance is None:
        return []
    here, plain = report.balance["largest_over_mean"], report.balance["plain_largest_over_mean"]
    cut = "zigzag" if report.balance["zigzag"] else "heads"
    return [f"attention, busiest rank over the mean: {here:.3f} ({cut}), {plain:.3f} in a plain cut\n"]


def kinds_table(kinds: Sequence[TensorKind]) -> FittedTable:
    """A column per kind, its bytes per rank and step."""
    columns = (Column("per rank and step", left=True), *(Column(kind.name) for kind in kinds))
    table = FittedTable(columns, title="kinds of tensor parallelism")
    for operation in kinds[0].payload:
        table.add_row(f"{operation}, payload", *(format_bytes(kind.payload[operation]) for kind in kinds))
    table.add_row("sent on a ring", *(format_bytes(kind.sent) for kind in kinds))
    table.add_row("saved activations", *(format_bytes(kind.saved) for kind in kinds))
    table.add_row("peak memory", *(format_bytes(kind.peak) for kind in kinds))
    if any(kind.seconds is not None for kind in kinds):
        table.add_row("step", *(format_time(kind.seconds) if kind.seconds else "" for kind in kinds))
    return table


def timing_lines(report: StepReport, cluster: Cluster | None, tokens: int) -> list[Renderable]:
    """`step_lines`; for an unmeasured CPU, how to measure it."""
    if report.timing is None and cluster is not None and cluster.device.kind == "cpu" and not cluster.device.measured:
        hint = "no time of a step: measure this machine with `shardwise calibrate device --ranks N --out FILE.toml`"
        return [f"{hint} and name it with --cluster"]
    return step_lines(report, tokens)


def node_line(node: NodeBytes, cluster: Cluster) -> list[str]:
    """What a node holds off its devices, against what its host has; nothing where that is nothing."""
    if not any(node):
        return []
    memory = cluster.memory_per_device if cluster.device.kind == "cpu" else cluster.host.memory_bytes
    if memory is None:
        has = "; its memory is not known: give --host-memory"
    elif cluster.device.kind == "cpu":
        has = f", in the {format_bytes(memory * cluster.devices_per_node)} of its ranks"
    else:
        has = f" of its {format_bytes(memory)}" + ": does not fit" * (node.host > memory)
    disk = f"{format_bytes(node.disk)} on disk and " if node.disk else ""
    return [f"off the devices, a node holds {disk}{format_bytes(node.host)} of host memory{has}"]
