"""The ledger of one steady training step in closed form: every logical collective of one rank, with its count. Of
`sync=local` it is a step that ends with an outer step.

Built on the `UnitPlan` alone. A test holds it to the ledger that the runtime observes, row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardwise.layout import pipeline
from shardwise.layout.axes import CP, DATA, PP, REPLICA, SERVER, TP, Axes, named
from shardwise.layout.experts import gathers_sequences
from shardwise.layout.gradients import gradients_over, norm_over
from shardwise.layout.homes import TO_HOST
from shardwise.layout.key_ranges import elements, key_ranges
from shardwise.layout.mesh import Mesh
from shardwise.layout.outer import outer_exchanges
from shardwise.layout.pipeline import phases
from shardwise.layout.placement import kv_heads_held
from shardwise.layout.state_rows import Rows, state_rows
from shardwise.layout.step import count_step
from shardwise.layout.tensor import collectives, edges
from shardwise.layout.units import UnitPlan
from shardwise.model.operations import AttentionCore
from shardwise.predict.memory.traced import more_received, trace_of
from shardwise.predict.traffic.experts import expert_rows, load_row
from shardwise.predict.traffic.homes import home_rows
from shardwise.report.step_report import LedgerRow

if TYPE_CHECKING:
    from shardwise.model.trace import Trace, TracedStep


def predict_ledger(plan: UnitPlan) -> tuple[LedgerRow, ...]:
    """All rows of `plan`'s rank, sorted. Sources: Rajbhandari et al. 2020 (ZeRO), Shoeybi et al. 2019 (tensor
    parallel), Korthikanti et al. 2022 (sequence parallel)."""
    rows: Rows = Counter()
    mesh = plan.mesh
    if traced := trace_of(plan):
        rows.update(traced_rows(plan, *traced))
    elif plan.layout.tp > 1:
        _tensor_parallel(rows, plan)
    if plan.layout.cp > 1:
        for part in plan.parts:
            for row, times in context_rows(plan, part, *forward_runs(plan, part)):
                rows[row] += times * plan.micro_batches
    for part in plan.parts if plan.blueprint.routes else ():
        for row, times in expert_rows(plan, part, *forward_runs(plan, part)):
            rows[row] += times
    rows.update(state_rows(plan))
    if plan.layout.pp > 1:
        rows.update(count_step(plan, _pipeline))
    if traced:
        rows.update(loss_rows(plan))
    else:
        rows["loss", "all_reduce", DATA, "valid tokens", "int64", 1] += 1
    rows["loss", "all_reduce", DATA + PP, "loss", "float64", 1] += 1
    if plan.layout.sync not in ("ps", "ssp"):  # whose servers know the norm of the sum
        rows["optimizer", "all_reduce", norm_over(plan), "gradient norm", "float64", 1] += 1
    rows.update(load_row(plan) if plan.blueprint.routes else ())
    rows.update(outer_rows(plan))
    return tuple(sorted([*ledger_of(rows, mesh), *home_rows(plan), *server_rows(plan)]))


def weight_ledger(plan: UnitPlan) -> tuple[LedgerRow, ...]:
    """Rows of parameters and gradients and, of maps that tensor parallelism cuts, of activations: what parameters alone
    determine."""
    rows: Rows = Counter()
    rows.update(state_rows(plan))
    if plan.layout.tp > 1:
        _tensor_parallel(rows, plan)
    return ledger_of(rows, plan.mesh)


def ledger_of(rows: Rows, mesh: Mesh) -> tuple[LedgerRow, ...]:
    """The rows of groups of more than one rank, by the names of their axes, sorted."""
    return tuple(
        sorted(
            LedgerRow(phase, op, name, unit, dtype, elements, n)  # type: ignore[arg-type]
            for (phase, op, axes, unit, dtype, elements), n in rows.items()
            if n and (name := mesh.name(axes))
        )
    )


def forward_runs(plan: UnitPlan, part: str) -> tuple[int, int]:
    """Forward passes of `part` in one micro-batch: (in the forward phase, again in the backward phase)."""
    if plan.blueprint.kind(part) != "block" or plan.layout.recompute in ("none", "selective"):
        return 1, 0
    if plan.layout.recompute == "full":
        return 1, 1
    blocks = next(blocks for blocks in map(plan.local.blocks, plan.stages) if part in blocks)
    return 1, len(blocks) - blocks.index(part)


def _tensor_parallel(rows: Rows, plan: UnitPlan) -> None:
    """Collectives of the maps, by the cuts of their weights; of norms over heads of several ranks, whose statistics are
    summed forward and backward; and of the loss over a split vocabulary."""
    k, dtype, table = plan.micro_batches, plan.layout.dtype, edges(plan.layout)
    wide = "float32" if dtype == "bfloat16" else dtype
    for part in plan.parts:
        once, again = forward_runs(plan, part)
        for operation in plan.blueprint.part(part).operations:
            for phase, op, width in collectives(operation, table, plan.layout.tp, gathers_sequences(plan.layout)):
                times = {"forward": once, "backward": again} if phase == "forward" else {"backward": 1}
                for when, count in times.items():
                    rows[when, op, TP, part, dtype, plan.tokens * width] += count * k
        for numbers in plan.blueprint.part(part).statistics if table["statistics"].leave == "sum" else ():
            for phase, runs in (("forward", once), ("backward", again + 1)):
                rows[(phase, "all_reduce", TP, part, wide, numbers * plan.tokens)] += runs * k
    if plan.of_kind("head"):
        rows[("loss", "all_reduce", TP, "cross-entropy", wide, plan.tokens)] += k
        rows[("loss", "all_reduce", TP, "cross-entropy", wide, 2 * plan.tokens)] += k


def _pipeline(plan: UnitPlan) -> Rows:
    """Messages as the rank's actions have them, named by the stage that takes them; and the sum of a tied table's
    gradients where both ends of the pipeline hold it."""
    rows: Rows = Counter()
    for action, phase in zip(plan.pipeline.actions, phases(plan.pipeline.actions), strict=True):
        if action.kind in ("SEND_F", "SEND_B"):
            taker = action.stage + (1 if action.kind == "SEND_F" else -1)
            elements, dtype = message_of(plan, min(action.stage, taker))
            rows[(phase, "send", PP, f"stage {taker}", dtype, elements)] += 1
        elif action.kind in ("RECV_F", "RECV_B"):
            elements, dtype = message_of(plan, action.stage - (action.kind == "RECV_F"))
            rows[(phase, "recv", PP, f"stage {action.stage}", dtype, elements)] += 1
        elif action.kind == "SUM_TIED":
            table = plan.by_name["tied"]
            for op in ("send", "recv"):
                rows[(phase, op, PP, "tied", plan.dtypes.gradients, table.shard_numel)] += 1
    return rows


def message_of(plan: UnitPlan, stage: int) -> tuple[int, str]:
    """(elements, dtype) of what a stage hands on. Of a traced module its last part says it."""
    traced = trace_of(plan)
    if traced is None:
        return plan.stream_tokens * plan.model.hidden, plan.layout.dtype
    trace, step = traced
    assert step.stages is not None
    last = plan.blueprint.stages(pipeline.stages(plan.subject, plan.layout).layers)[stage][-1]
    message = next(message for message in step.stages.messages if message.part == last)
    return trace.at(message.elements, plan.layout.micro), message.dtype


def outer_rows(plan: UnitPlan) -> Counter[tuple[str, str, Axes, str, str, int]]:
    """The sums of outer gradients, unit by unit, and of the loss and tokens of each step since the one before."""
    rows: Counter[tuple[str, str, Axes, str, str, int]] = Counter()
    if plan.layout.local_sgd:
        for unit in (unit for unit in plan.units if not unit.frozen):
            for op, axes, dtype, elements in outer_exchanges(plan, unit):
                rows["optimizer", op, axes, unit.name, dtype, elements] += 1
        rows["loss", "all_reduce", REPLICA, "loss", "float64", 2 * plan.layout.every] += 1
    return rows


def server_rows(plan: UnitPlan) -> Iterator[LedgerRow]:
    """One gradient pushed to each server, and its new weights pulled. Source: Li et al. 2014."""
    for server, segments in enumerate(key_ranges(plan) if plan.layout.parameter_servers.count else ()):
        for op, dtype in (("push", plan.dtypes.gradients), ("pull", plan.layout.dtype)):
            yield LedgerRow("optimizer", op, SERVER, f"server {server}", dtype, elements(segments), 1)


def traced_rows(plan: UnitPlan, trace: Trace, step: TracedStep) -> Counter[tuple[Any, ...]]:
    """Rows of the maps on a rank, as of `ledger.Rows`: those of the traced step, for every micro-batch."""
    rows: Counter[tuple[Any, ...]] = Counter()
    for one in step.collectives:
        unit = one.unit if plan.layout.pp == 1 else one.end or one.unit
        if unit not in plan.parts or one.group == TO_HOST[1]:
            continue
        axes, elements = named(one.group) or TP, trace.at(one.elements, plan.layout.micro)
        equal = trace.at(one.received, plan.layout.micro)
        if plan.routed is None or not equal:
            rows[one.phase, one.op, axes, unit, one.dtype, elements] += one.count * plan.micro_batches
            continue
        for micro in range(plan.micro_batches):
            come = elements + more_received(plan, equal, unit, micro)
            rows[one.phase, one.op, axes, unit, one.dtype, come] += one.count
    return rows


def loss_rows(plan: UnitPlan) -> Counter[tuple[Any, ...]]:
    """Sums of tokens, which a user's loss counts itself: those of later micro-batches are known after the first one's
    backward pass. Under a pipeline the last stage counts, and tells the others. All ranks then learn which parameters
    have gradients."""
    rows: Counter[tuple[Any, ...]] = Counter()
    trained = sum(not parameter.frozen for parameter in plan.blueprint.parameters())
    rows["loss", "all_reduce", gradients_over(plan), "gradients", "int64", trained] += 1
    if plan.layout.pp == 1:
        rows["loss", "all_reduce", DATA, "valid tokens", "float64", 1] += 2 if plan.micro_batches > 1 else 1
        return rows
    if plan.of_kind("exit"):
        rows["loss", "all_reduce", DATA, "valid tokens", "float64", 1] += 2
    rows["loss", "all_reduce", PP, "valid tokens", "float64", 2] += 1
    return rows


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
