"""Messages of context parallelism: the collectives of attention over cut sequences, in closed form."""

from collections.abc import Iterator

from shardwise.layout.axes import CP
from shardwise.layout.placement import kv_heads_held
from shardwise.layout.units import UnitPlan
from shardwise.model.operations import AttentionCore

Row = tuple[str, str, tuple[str, ...], str, str, int]


def context_rows(plan: UnitPlan, part: str, once: int, again: int) -> Iterator[tuple[Row, int]]:
    """((phase, operation, axes, part, dtype, elements), times) of one micro-batch. once, again: forward passes of the
    part in the forward phase, and in the backward phase.

    Sources: Liu et al. 2023 (ring), Llama Team 2024 (all-gather), Jacobs et al. 2023 (Ulysses).
    """
    if not any(isinstance(operation, AttentionCore) for operation in plan.blueprint.part(part).operations):
        return
    layout, dtype = plan.layout, plan.layout.dtype
    again += layout.recompute == "selective"
    wide = "float32" if dtype == "bfloat16" else dtype

    def row(phase: str, op: str, elements: int, times: int, dtype: str = dtype) -> tuple[Row, int]:
        return (phase, op, CP, part, dtype, elements), times

    if layout.ulysses:
        for elements in exchanged(plan):
            yield row("forward", "all_to_all", elements, once)
            yield row("backward", "all_to_all", elements, again + 1)
    elif layout.cpkind == "ring":
        for op in ("send", "recv"):
            yield row("forward", op, keys_and_values(plan), (layout.cp - 1) * once)
            yield row("backward", op, keys_and_values(plan), (layout.cp - 1) * (again + 1))
            yield row("backward", op, keys_and_values(plan), layout.cp, wide)
    else:
        elements = layout.cp * keys_and_values(plan)
        yield row("forward", "all_gather_into", elements, once)
        yield row("backward", "all_gather_into", elements, again + 1)
        yield row("backward", "reduce_scatter", elements, 1, wide)


def keys_and_values(plan: UnitPlan) -> int:
    """Elements of the keys and values of a rank's tokens of one micro-batch."""
    return plan.tokens * kv_heads_held(plan.model, plan.layout.tp) * (plan.model.head_dim + plan.model.value_dim)


def exchanged(plan: UnitPlan) -> tuple[int, int]:
    """Elements of Ulysses' all-to-alls: queries, keys and values, each key/value head as often as ranks need it; and
    attention's output."""
    heads = plan.model.heads // plan.layout.tp
    kv = kv_heads_held(plan.model, plan.layout.tp)
    kv *= max(1, plan.layout.cp // kv)
    keys, values = plan.model.head_dim, plan.model.value_dim
    return plan.tokens * (heads * keys + kv * (keys + values)), plan.tokens * heads * values
