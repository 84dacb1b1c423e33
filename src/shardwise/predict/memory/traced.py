"""Activations of a traced module, from the traced step that has a layout's tp, precision and recomputation.

Parameters, gradients, optimizer state and communication buffers follow from the units, as of any model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.errors import UserError
from shardwise.layout.homes import TO_HOST
from shardwise.layout.layout import traced_cut
from shardwise.layout.units import UnitPlan
from shardwise.model.blueprint import Blueprint
from shardwise.predict.memory.buffers import MemoryByClass, held_through_step
from shardwise.predict.memory.outer import outer_transient

if TYPE_CHECKING:
    from shardwise.model.trace import Trace, TracedStep


def trace_of(plan: UnitPlan) -> tuple[Trace, TracedStep] | None:
    """The trace of a module and its step of the plan's layout; None for a model that has a configuration. Raises
    `UserError` for a module that was not traced, and `LayoutError` for a layout that was not."""
    if not isinstance(plan.subject, Blueprint):
        return None
    trace, layout = plan.subject.trace, plan.layout
    if trace is None:
        raise UserError(f"{plan.subject.name} was not traced, so its activations are not known: see shardwise.trace")
    return trace, trace.step(layout.tp, layout.precision, layout.recompute, traced_cut(layout), layout.micro)


def traced_saved(plan: UnitPlan, trace: Trace, step: TracedStep) -> int:
    """Bytes that a micro-batch saves for backward."""
    rows = ((part, trace.at(nbytes, plan.layout.micro)) for part, nbytes in step.received)
    beyond = sum(more_received(plan, equal, part, 0) for part, equal in rows)
    return sum(saved_by_part(plan, trace, step).values()) + beyond


def saved_by_part(plan: UnitPlan, trace: Trace, step: TracedStep) -> dict[str, int]:
    """Part -> bytes that a micro-batch saves in it, where experts everywhere receive as many rows."""
    return {part: trace.at(nbytes, plan.layout.micro) for part, nbytes in step.saved}


def traced_stored(plan: UnitPlan, trace: Trace, step: TracedStep) -> dict[str, int]:
    """Part -> bytes that its blocks copy to the host's memory in the first micro-batch."""
    stored = {}
    for copy in step.collectives:
        if (copy.op, copy.group) == TO_HOST:
            equal, received = (trace.at(pair, plan.layout.micro) for pair in (copy.elements, copy.received))
            stored[copy.unit] = equal + more_received(plan, received, copy.unit, 0)
    return stored


def more_received(plan: UnitPlan, equal: int, part: str, micro: int) -> int:
    """Bytes, or elements, beyond `equal`, those of the rows that a part's experts receive where all receive as many:
    0 without a record of what they have received."""
    if not equal or plan.routed is None or part not in plan.routed.by_part:
        return 0
    rows = plan.routed.by_part[part]
    sent, come = rows[micro % len(rows)] if rows else (0, 0)  # one alone stands for all
    return equal * come // sent - equal if sent else 0


def _crowd(plan: UnitPlan, part: str) -> float:
    """Rows that experts receive for each one that is sent, of the fullest micro-batch: in all parts, or more in this
    one; 1 without a record."""
    routed = plan.routed.by_part if plan.routed else {}
    of_micros = zip(*filter(None, routed.values()), strict=False)
    sums = [tuple(map(sum, zip(*rows, strict=True))) for rows in of_micros]
    return max((come / sent for sent, come in (*sums, *routed.get(part, ())) if sent), default=1.0)


def traced_moments(
    plan: UnitPlan, trace: Trace, step: TracedStep, optimizer: int
) -> Iterator[tuple[MemoryByClass, int]]:
    """As of `peak.moments`. optimizer: transient bytes of the update."""
    rows = plan.layout.micro
    earlier = (plan.micro_batches - 1) * trace.at(step.inputs, rows)
    first: dict[tuple[str, str], int] = {}
    later: dict[tuple[str, str], int] = {}
    for moment in step.moments:
        more = round(trace.at(moment.received, rows) * (_crowd(plan, moment.part) - 1))
        first[moment.when, moment.part] = trace.at(moment.first, rows) + more
        later[moment.when, moment.part] = trace.at(moment.later, rows) + more
    (root,) = plan.of_kind("root")
    for held in held_through_step(plan):
        beside = later if held.adds else first
        if held.when in ("landing", "optimizer", "outer"):
            transient = {"optimizer": optimizer, "outer": outer_transient(plan)}.get(held.when, 0)
            yield held, earlier + beside["reduction", root] + transient
        else:
            yield held, earlier + beside[held.when, held.part]
