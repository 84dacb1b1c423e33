"""Memory of a measured step over time, its peak, and the tensors that were there then."""

from collections.abc import Sequence
from typing import Any

from shardwise.report.palette import BYTE_CLASSES
from shardwise.report.step_memory import CLASSES, StepMemory
from shardwise.report.units import format_bytes, format_time
from shardwise.studio.columns import Table

SHOWN = 10
"""Tensors that are drawn."""
HOW_PEAK = [
    "Every storage is followed from the operation that made it to its end, which makes the step slow.",
    "saved: what backward needs; parameters and optimizer state are there all the time.",
    "rank 0's step as PyTorch's memory viewer opens it: reports/memory.pickle, for pytorch.org/memory_viz.",
]
"""How the memory of a step is measured."""


def memory_step(traces: Sequence[StepMemory]) -> dict[str, Table]:
    """Tables "over" (the curve of each rank) and "peak" (tensors at the peak)."""
    labels = [BYTE_CLASSES[name].label for name in CLASSES]
    points = [
        (one.rank, at, *(one.bytes[name][i] for name in CLASSES)) for one in traces for i, at in enumerate(one.at)
    ]
    units = {"rank": "", "at": "seconds", **dict.fromkeys(labels, "bytes")}
    tensors = [
        (one.rank, BYTE_CLASSES[row.byte_class].label, row.what, row.count, row.bytes)
        for one in traces
        for row in one.tensors
    ]
    columns = {"rank": "", "class": "", "tensors": "", "count": "count", "bytes": "bytes"}
    over = Table.of_rows("Memory over one step", units, points)
    return {"over": over, "peak": Table.of_rows("The largest tensors at the peak", columns, tensors)}


def peak_bars(traces: Sequence[StepMemory]) -> list[dict[str, Any]]:
    """The largest tensors at the peak of the first rank."""
    bars = []
    for row in traces[0].tensors[:SHOWN]:
        made_by, _, shape = row.what.partition(" ")
        detail = f"{row.count} x {shape}" if row.count > 1 else shape
        parts = [(row.byte_class, row.bytes)]
        bars.append({"label": made_by, "detail": detail, "total": row.bytes, "parts": parts, "words": ""})
    return bars


def peak_words(one: StepMemory) -> str:
    """When a rank's peak was, and how much was there."""
    total = format_bytes(sum(one.peak.values()))
    when = f"{format_time(one.peak_at)} after step {one.step} began, which took {format_time(one.seconds)}"
    return f"rank {one.rank}: {total} in {one.during}, {when}"
