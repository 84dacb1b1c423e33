"""Messages of expert parallelism: tokens on the way to their experts and back, and what routers agree on.

How many rows come to a rank depends on the data: it is exact with a recorded routing (`UnitPlan.routed`), and else what
equal loads would be.
"""

from collections.abc import Iterator

from shardwise.layout.axes import EP, PP, TP, Axes
from shardwise.layout.experts import LOADS, gathers_sequences, load_axes, sequence_axes, slice_of, slices_tokens
from shardwise.layout.units import UnitPlan
from shardwise.model.config import Experts

Row = tuple[str, str, Axes, str, str, int]


def expert_rows(plan: UnitPlan, part: str, once: int, again: int) -> Iterator[tuple[Row, int]]:
    """((phase, operation, axes, part, dtype, elements), times) of a step. once, again: forward passes of the part in
    the forward phase, and in the backward phase."""
    if not plan.blueprint.routes_in(part):
        return
    e, hidden, dtype = _experts(plan), plan.model.hidden, plan.layout.dtype
    mesh, micro_batches = plan.mesh, plan.micro_batches

    def both(op: str, axes: Axes, dtype: str, elements: int, more: int = 0) -> Iterator[tuple[Row, int]]:
        """Rows of every forward pass, and so many of the backward pass besides."""
        yield ("forward", op, axes, part, dtype, elements), once * micro_batches
        yield ("backward", op, axes, part, dtype, elements), (again + more) * micro_batches

    yield from both("all_to_all", EP, "int64", e.count)
    if slices_tokens(plan.layout):
        each = slice_of(plan.layout, plan.tokens)
        yield from both("all_gather_into", TP, dtype, plan.layout.tp * each * hidden, more=1)
    if e.capacity:
        axes = sequence_axes(plan.layout)
        # The most rows that any rank routes, padding included.
        most = plan.tokens if gathers_sequences(plan.layout) else slice_of(plan.layout, plan.tokens)
        yield from both("all_gather_into", axes, "int64", mesh.size(axes) * most * e.active)
    if e.balance_loss or e.z_loss:
        everywhere = e.balance == "global"
        axes = load_axes(plan.layout) if everywhere else sequence_axes(plan.layout)
        elements = e.count * (1 if everywhere else plan.layout.micro)
        yield ("backward", "all_reduce", axes, part, "int64", elements), micro_batches
    for micro in range(micro_batches):
        for rows in plan.routing.rows(part, micro):
            yield ("forward", "all_to_all", EP, part, dtype, rows * hidden), once
            yield ("backward", "all_to_all", EP, part, dtype, rows * hidden), again + 1


def load_row(plan: UnitPlan) -> Iterator[Row]:
    """The sum of the loads of all mixtures after a step."""
    mixtures = [part for part in plan.blueprint.names if plan.blueprint.routes_in(part)]
    if mixtures:
        elements = len(mixtures) * (_experts(plan).count + 2)
        yield "optimizer", "all_reduce", load_axes(plan.layout) + PP, LOADS, "float64", elements


def _experts(plan: UnitPlan) -> Experts:
    assert plan.model.experts
    return plan.model.experts
