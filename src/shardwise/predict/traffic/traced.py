"""Collectives of a traced module over its tensor-parallel ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shardwise.layout.axes import TP
from shardwise.layout.units import UnitPlan
from shardwise.model.trace import Trace, TracedStep


def traced_rows(plan: UnitPlan, trace: Trace, step: TracedStep) -> Counter[tuple[Any, ...]]:
    """Rows of the maps, as of `ledger.Rows`: those of the traced step, for every micro-batch."""
    rows: Counter[tuple[Any, ...]] = Counter()
    for each in step.collectives:
        elements = trace.at(each.elements, plan.layout.micro)
        rows[each.phase, each.op, TP, each.unit, each.dtype, elements] += each.count * plan.micro_batches
    return rows
