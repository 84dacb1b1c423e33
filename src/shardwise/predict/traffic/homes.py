"""Copies of one step between a rank's device, its host's memory and its file, as rows of the ledger."""

from collections import Counter
from typing import cast

from shardwise.layout.gathers import gather_counts, packed_bytes
from shardwise.layout.homes import DISK_READ, DISK_WRITE, TO_DEVICE, TO_HOST, accumulates_on_host, offloaded, on_device
from shardwise.layout.outer import averaged_moments
from shardwise.layout.unit import Unit
from shardwise.layout.units import UnitPlan
from shardwise.predict.memory.activations import stored_by_part
from shardwise.report.step_report import LedgerRow, Phase


def home_rows(plan: UnitPlan) -> list[LedgerRow]:
    """Rows of what the layout offloads: gradients and parameters of every unit, optimizer state, saved activations."""
    rows: Counter[tuple[Phase, tuple[str, str], str, str, int]] = Counter()
    if plan.layout.offload_home != "none":
        for unit in plan.units:
            if not unit.frozen:
                _update(rows, plan, unit)
    if plan.layout.offloads_params:
        for (phase, unit), times in _fetches(plan).items():
            moved = unit.name, plan.dtypes.gathered(unit), unit.shard_numel
            rows[phase, TO_DEVICE, *moved] += times
            if plan.layout.params_on_disk:
                rows[phase, DISK_READ, *moved] += times
    if plan.layout.offloads_activations:
        each = [plan.as_micro_batch(micro) for micro in range(plan.micro_batches)] if plan.routed else [plan]
        for one in each:
            for part, nbytes in stored_by_part(one).items():
                rows["forward", TO_HOST, part, "uint8", nbytes] += plan.micro_batches // len(each)
                rows["backward", TO_DEVICE, part, "uint8", nbytes] += plan.micro_batches // len(each)
    return [
        LedgerRow(phase, op, axes, unit, dtype, elements, times)
        for (phase, (op, axes), unit, dtype, elements), times in rows.items()
        if elements
    ]


def _update(rows: Counter[tuple[Phase, tuple[str, str], str, str, int]], plan: UnitPlan, unit: Unit) -> None:
    """Gradients to the host's cores, their state from and to the disk, and new parameters to where these are kept;
    outer gradients to the device, and their mean back."""
    layout, moved, stays = plan.layout, offloaded(plan, unit), on_device(plan, unit)
    if accumulates_on_host(plan):
        rows["backward", TO_HOST, unit.name, plan.dtypes.wire, unit.shard_numel] += plan.reductions
        rows["optimizer", TO_DEVICE, unit.name, plan.dtypes.gradients, stays] += 1
    else:
        rows["optimizer", TO_HOST, unit.name, plan.dtypes.gradients, moved] += 1
    if layout.offload_home == "nvme":
        for op in (DISK_READ, DISK_WRITE):
            rows["optimizer", op, unit.name, plan.dtypes.master, len(plan.workload.states) * moved] += 1
    updates = 1
    if layout.local_sgd:
        updates = 2  # the outer step's, too
        for op in (TO_DEVICE, TO_HOST):
            crossing = unit.shard_numel + averaged_moments(plan) * moved
            rows["optimizer", op, unit.name, plan.dtypes.master, crossing] += 1
    if not layout.offloads_params:
        rows["optimizer", TO_DEVICE, unit.name, layout.dtype, moved] += updates
    else:
        rows["optimizer", TO_HOST, unit.name, layout.dtype, stays] += updates
    if layout.params_on_disk:
        rows["optimizer", DISK_WRITE, unit.name, layout.dtype, unit.shard_numel] += updates


def _fetches(plan: UnitPlan) -> Counter[tuple[Phase, Unit]]:
    """Times that a unit's own interval is read for a gather: not from second copies, and once where it stays packed."""
    found: Counter[tuple[Phase, Unit]] = Counter()
    for (when, gather), times in gather_counts(plan).items():
        phase, unit = cast(Phase, when), plan.by_name[gather.unit]
        if unit.copy_ranks and gather.axes == unit.again:
            continue
        if not packed_bytes(plan, unit):
            found[phase, unit] += times
        elif phase == "forward":
            found[phase, unit] = 1
    return found
