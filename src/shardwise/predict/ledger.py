"""The ledger of one steady training step in closed form: every logical collective of one rank, with its count.

Built on the `UnitPlan` alone. A test holds it to the ledger that the runtime observes, row by row.
"""

from __future__ import annotations

from collections import Counter

from shardwise.layout.grid import Grid
from shardwise.layout.pipeline import phases
from shardwise.layout.units import UnitPlan
from shardwise.report.step_report import LedgerRow

Key = tuple[str, str, str, str, str, int]


def predict_ledger(plan: UnitPlan) -> tuple[LedgerRow, ...]:
    """All rows of `plan`'s rank, sorted. Sources: Rajbhandari et al. 2020 (ZeRO), Shoeybi et al. 2019 (tensor
    parallel), Korthikanti et al. 2022 (sequence parallel)."""
    rows: Counter[Key] = Counter()
    grid = Grid.of(plan.layout, plan.model)
    if plan.layout.tp > 1:
        _tensor_parallel(rows, plan)
        _partial_gradients(rows, plan)
    _data_parallel(rows, plan, grid)
    if plan.layout.pp > 1:
        rows.update(plan.count(_pipeline))
    _scalars(rows, plan, grid)
    return tuple(sorted(LedgerRow(*key, count=n) for key, n in rows.items() if n))  # type: ignore[arg-type]


def forward_runs(plan: UnitPlan, part: str) -> tuple[int, int]:
    """How often `part`'s forward runs in one micro-batch: (in the forward phase, again in the backward phase)."""
    if not part.startswith("blocks.") or plan.layout.recompute in ("none", "selective"):
        return 1, 0
    if plan.layout.recompute == "full":
        return 1, 1
    blocks = next(blocks for blocks in map(plan.blocks, plan.stages) if part in blocks)
    return 1, len(blocks) - blocks.index(part)


def _tensor_parallel(rows: Counter[Key], plan: UnitPlan) -> None:
    """Sums of activations over tp; with sp every sum is a reduce-scatter, and every input is gathered.

    A block has two column-parallel inputs (attention, feed-forward) and two row-parallel outputs; the embedding is an
    output alone, the head an input alone. Under sp a column-parallel backward gathers its input again.
    """
    k, dtype, sp = plan.micro_batches, plan.layout.dtype, plan.layout.sp
    full = plan.tokens * plan.model.hidden

    def add(phase: str, op: str, part: str, count: int) -> None:
        rows[(phase, op, "tp", part, dtype, full)] += count * k

    for part in plan.parts:
        ins, outs = {"embedding": (0, 1), "head": (1, 0)}.get(part, (2, 2))
        once, again = forward_runs(plan, part)
        for phase, runs in (("forward", once), ("backward", again)):
            if sp:
                add(phase, "all_gather_into", part, ins * runs)
                add(phase, "reduce_scatter", part, outs * runs)
            else:
                add(phase, "all_reduce", part, outs * runs)
        if sp:
            add("backward", "all_gather_into", part, outs + ins)
            add("backward", "reduce_scatter", part, ins)
        else:
            add("backward", "all_reduce", part, ins)
    if "head" in plan.parts:
        wide = "float32" if dtype == "bfloat16" else dtype
        rows[("loss", "all_reduce", "tp", "cross-entropy", wide, plan.tokens)] += k
        rows[("loss", "all_reduce", "tp", "cross-entropy", wide, 2 * plan.tokens)] += k


def _partial_gradients(rows: Counter[Key], plan: UnitPlan) -> None:
    """Gradients of replicated weights that each tp rank saw only in part, summed where ZeRO reduces them."""
    each = plan.layout.stage >= 2
    dtype = plan.layout.dtype if each else plan.grad_dtype
    for unit in plan.units:
        for axis in ("kv", "tp"):
            start, stop = unit.grad_sum(axis)  # type: ignore[arg-type]
            if start < stop:
                rows[("backward", "all_reduce", axis, unit.name, dtype, stop - start)] += (
                    plan.micro_batches if each else 1
                )


def _data_parallel(rows: Counter[Key], plan: UnitPlan, grid: Grid) -> None:
    stage, k = plan.layout.stage, plan.micro_batches
    shard, dtype = grid.axes_name("shard"), plan.layout.dtype
    gathers = plan.gather_counts() if stage == 3 else Counter()
    for unit in plan.units:
        if stage == 0 and plan.layout.data_ranks > 1:
            data = grid.axes_name("data")
            rows[("backward", "all_reduce", data, unit.name, plan.grad_dtype, unit.padded)] += 1
        if stage >= 1:
            times = k if stage >= 2 else 1
            rows[("backward", "reduce_scatter", shard, unit.name, plan.wire_dtype, unit.padded)] += times
        if stage in (1, 2):
            rows[("optimizer", "all_gather_into", shard, unit.name, dtype, unit.padded)] += 1
        if stage == 3:
            for phase in ("forward", "backward"):
                rows[(phase, "all_gather_into", shard, unit.name, dtype, unit.padded)] += gathers[phase, unit.name]
        if stage >= 1 and plan.layout.replicate_ranks > 1:
            replicate = grid.axes_name("replicate")
            rows[("backward", "all_reduce", replicate, unit.name, plan.grad_dtype, unit.shard_numel)] += 1


def _pipeline(plan: UnitPlan) -> Counter[Key]:
    """Messages as the rank's actions have them, named by the stage that takes them; and the sum of a tied table's
    gradients where both ends of the pipeline hold it."""
    rows: Counter[Key] = Counter()
    elements = plan.stream_tokens * plan.model.hidden
    for action, phase in zip(plan.actions, phases(plan.actions), strict=True):
        if action.kind in ("SEND_F", "SEND_B"):
            taker = action.stage + (1 if action.kind == "SEND_F" else -1)
            rows[(phase, "send", "pp", f"stage {taker}", plan.layout.dtype, elements)] += 1
        elif action.kind in ("RECV_F", "RECV_B"):
            rows[(phase, "recv", "pp", f"stage {action.stage}", plan.layout.dtype, elements)] += 1
        elif action.kind == "SUM_TIED":
            table = plan.by_name["tied"]
            for op in ("send", "recv"):
                rows[(phase, op, "pp", "tied", plan.grad_dtype, table.shard_numel)] += 1
    return rows


def _scalars(rows: Counter[Key], plan: UnitPlan, grid: Grid) -> None:
    if data := grid.axes_name("data"):
        rows[("loss", "all_reduce", data, "valid tokens", "int64", 1)] += 1
    if axes := grid.axes_name("data_pp"):
        rows[("loss", "all_reduce", axes, "loss", "float64", 1)] += 1
    if axes := grid.axes_name("shard_tp_pp"):
        rows[("optimizer", "all_reduce", axes, "gradient norm", "float64", 1)] += 1
