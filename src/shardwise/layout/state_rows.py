"""Collectives of a step that parameters alone determine: their gathers, and the sums of their gradients."""

from __future__ import annotations

from collections import Counter

from shardwise.layout.axes import Axes
from shardwise.layout.gathers import gather_counts, gathered_elements
from shardwise.layout.gradients import packed_gradients
from shardwise.layout.units import UnitPlan

Rows = Counter[tuple[str, str, Axes, str, str, int]]
"""Collectives before their axes have names: phase, operation, axes, unit, dtype, elements -> count."""


def state_rows(plan: UnitPlan) -> Rows:
    """Gathers of parameters, and sums of gradients: parts over the tensor-parallel ranks, then hop by hop."""
    rows: Rows = Counter()
    for (phase, gather), times in gather_counts(plan).items():
        rows[phase, "all_gather_into", gather.axes, gather.unit, gather.dtype, gathered_elements(plan, gather)] += times
    for unit in plan.units:
        for start, stop, axes in unit.partial_sums:
            rows["backward", "all_reduce", axes, unit.name, plan.dtypes.wire, stop - start] += plan.reductions
        pieces = unit.shard_ranks
        for hop in unit.reduce:
            piece = packed_gradients(plan, unit) if hop.op == "all_to_all" else unit.shard_numel
            rows["backward", hop.op, hop.axes, unit.name, hop.dtype, pieces * piece] += hop.times
            if hop.op != "all_reduce":
                pieces //= plan.mesh.size(hop.axes)
    return rows
