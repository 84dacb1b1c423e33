"""Rows of an outer step of `sync=local`: the only ones that cross from replica to replica."""

from __future__ import annotations

from collections import Counter

from shardwise.layout.axes import REPLICA, Axes
from shardwise.layout.outer import outer_exchanges
from shardwise.layout.units import UnitPlan


def outer_rows(plan: UnitPlan) -> Counter[tuple[str, str, Axes, str, str, int]]:
    """The sums of outer gradients, unit by unit, and of the loss and tokens of each step since the one before."""
    rows: Counter[tuple[str, str, Axes, str, str, int]] = Counter()
    if plan.layout.local_sgd:
        for unit in plan.units:
            for op, axes, dtype, elements in outer_exchanges(plan, unit):
                rows["optimizer", op, axes, unit.name, dtype, elements] += 1
        rows["loss", "all_reduce", REPLICA, "loss", "float64", 2 * plan.layout.every] += 1
    return rows
