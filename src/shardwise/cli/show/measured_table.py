"""A measured step beside its prediction: arithmetic by part, waits, the whole, and what was not measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.report import StepReport
from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_ranks, format_share, format_time

if TYPE_CHECKING:
    from shardwise.emulate.measured_step import MeasuredStep

PREDICTED = {
    "forward, loss and backward": ("matmul", "attention", "memory", "gradients", "host"),
    "optimizer": ("optimizer",),
    "waits for collectives": ("tensor", "experts", "data", "offload"),
    "other ranks, messages between stages": ("bubble", "pipeline"),
}
"""Row of the table -> the predicted parts that it has."""
ARITHMETIC = {
    "forward": "forward",
    "loss": "loss",
    "recompute": "recomputation, block by block",
    "backward": "backward, with other recomputation",
    "rest": "counting tokens, adding up gradients",
}
"""Measured parts of the first row."""


def measured_lines(report: StepReport, measured: MeasuredStep, tokens: int) -> Iterator[Renderable]:
    """Lines and tables of a measured step. tokens: of a step, over all ranks."""
    yield _conclusion(report, measured, tokens)
    yield _parts(report, measured)
    if measured.waits:
        yield _waits(measured)
    yield ""
    yield _ledger(measured)
    yield from measured.notes


def _conclusion(report: StepReport, measured: MeasuredStep, tokens: int) -> str:
    low, high = min(measured.repeats), max(measured.repeats)
    steps = len(measured.repeats)
    spread = f"median of {steps} steps, {format_time(low)} to {format_time(high)}" if steps > 1 else "one step"
    line = (
        f"a step takes {format_time(measured.seconds)} with measured arithmetic ({spread}), "
        f"{tokens / measured.seconds:,.0f} tokens/s"
    )
    if report.time:
        line += f"; predicted alone {format_time(report.time)} ({report.time / measured.seconds - 1:+.1%})"
    at_once = f"{measured.processes} at once" if measured.processes > 1 else "alone"
    return f"{line}\nmeasured: shares of {format_ranks(measured.ranks)}, {at_once}, on {measured.device}\n"


def _parts(report: StepReport, measured: MeasuredStep) -> FittedTable:
    columns = (Column("part of a step, of the busiest share", left=True), Column("predicted"), Column("measured"))
    table = FittedTable(columns)
    predicted = report.timing["parts"] if report.timing else None
    optimizer = measured.parts.get("optimizer", 0.0)
    arithmetic = sum(measured.parts.values()) - optimizer
    seconds = (arithmetic, optimizer, sum(wait.waited for wait in measured.waits), measured.others)
    for (row, names), own in zip(PREDICTED.items(), seconds, strict=True):
        whole = format_time(sum(predicted.get(name, 0.0) for name in names)) if predicted is not None else ""
        table.add_row(row, whole, format_time(own))
        if names == PREDICTED["forward, loss and backward"]:
            for name, words in ARITHMETIC.items():
                if measured.parts.get(name):
                    table.add_row(f"  {words}", "", format_time(measured.parts[name]))
    table.add_row("step", format_time(report.time) if report.time else "", format_time(measured.seconds))
    return table


def _waits(measured: MeasuredStep) -> FittedTable:
    columns = (
        Column("collective", left=True), Column("over", left=True), Column("calls"), Column("predicted"),
        Column("waited"), Column("of the step"),
    )  # fmt: skip
    table = FittedTable(columns)
    for wait in measured.waits:
        share = format_share(wait.waited / measured.seconds)
        table.add_row(
            wait.op, wait.axes, f"{wait.calls:,}", format_time(wait.predicted), format_time(wait.waited), share
        )
    return table


def _ledger(measured: MeasuredStep) -> str:
    if not measured.ledger_differs:
        return "the communication ledger (every collective of a step) of the shares equals the predicted one"
    more = len(measured.ledger_differs) - 1
    return f"the ledger differs from the predicted one: {measured.ledger_differs[0]}{f', and {more} more' * (more > 0)}"
