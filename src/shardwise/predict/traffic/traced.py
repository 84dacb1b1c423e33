"""Collectives of a traced module over its tensor-parallel ranks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from shardwise.layout.axes import DATA, PP, TP
from shardwise.layout.units import UnitPlan

if TYPE_CHECKING:
    from shardwise.model.trace import Trace, TracedStep


def traced_rows(plan: UnitPlan, trace: Trace, step: TracedStep) -> Counter[tuple[Any, ...]]:
    """Rows of the maps on a rank, as of `ledger.Rows`: those of the traced step, for every micro-batch."""
    rows: Counter[tuple[Any, ...]] = Counter()
    for each in step.collectives:
        unit = each.unit if plan.layout.pp == 1 else each.end or each.unit
        if unit in plan.parts:
            elements = trace.at(each.elements, plan.layout.micro)
            rows[each.phase, each.op, TP, unit, each.dtype, elements] += each.count * plan.micro_batches
    return rows


def loss_rows(plan: UnitPlan) -> Counter[tuple[Any, ...]]:
    """Sums of tokens, which a user's loss counts itself: those of later micro-batches are known after the first one's
    backward pass. Under a pipeline the last stage counts, and tells the others. All ranks then learn which parameters
    have gradients."""
    rows: Counter[tuple[Any, ...]] = Counter()
    trained = sum(not parameter.frozen for parameter in plan.blueprint.parameters())
    rows["loss", "all_reduce", plan.gradients_over, "gradients", "int64", trained] += 1
    if plan.layout.pp == 1:
        rows["loss", "all_reduce", DATA, "valid tokens", "float64", 1] += 2 if plan.micro_batches > 1 else 1
        return rows
    if plan.of_kind("exit"):
        rows["loss", "all_reduce", DATA, "valid tokens", "float64", 1] += 2
    rows["loss", "all_reduce", PP, "valid tokens", "float64", 2] += 1
    return rows
