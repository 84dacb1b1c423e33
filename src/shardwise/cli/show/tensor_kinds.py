"""The table of the kinds of tensor parallelism side by side."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.predict.tensor_kinds import TensorKind
from shardwise.report.terminal import Column, FittedTable
from shardwise.report.units import format_bytes, format_time


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
