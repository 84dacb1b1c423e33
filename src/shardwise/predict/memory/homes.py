"""Bytes of one rank off the device, by class: in the host's memory, and in its file on disk."""

from dataclasses import replace

from shardwise.layout.homes import (
    BUFFERS,
    accumulates_on_host,
    gradient_chunk,
    offloaded,
    parameter_buffers,
    state_file,
)
from shardwise.layout.units import UnitPlan
from shardwise.predict.memory.activations import stored_activations
from shardwise.predict.memory.outer import outer_state_bytes
from shardwise.predict.traffic.schedules import staged_bytes
from shardwise.report.step_report import DTYPE_BYTES, Bytes


def host_bytes(plan: UnitPlan) -> Bytes:
    """Bytes in the host's memory, and as `comm` also the staging buffer of ranks that share a GPU, without messages
    under way."""
    held = offloaded_bytes(plan)
    return replace(held, comm=held.comm + staged_bytes(plan)) if plan.trains else held


def offloaded_bytes(plan: UnitPlan) -> Bytes:
    """Bytes in the host's memory: offloaded state; gradients for its update; saved activations; and, as `comm`, the
    buffers of the file, those of parameters on their way, and a chunk of gradients in the precision of the update."""
    layout, saved = plan.layout, 0
    if not plan.trains:
        return Bytes()
    if layout.offloads_activations:
        if layout.pp > 1:
            from shardwise.predict.memory.pipeline import held_by_actions

            saved = held_by_actions(plan).stored
        else:
            saved = stored_activations(plan)
    if layout.offload_home == "none":
        return Bytes(saved=saved)
    wide, arrays = DTYPE_BYTES[plan.dtypes.master], len(plan.workload.states)
    elements = sum(offloaded(plan, unit) for unit in plan.units)
    shards = sum(unit.shard_numel * DTYPE_BYTES[plan.dtypes.gathered(unit)] for unit in plan.units)
    trained = sum(unit.shard_numel for unit in plan.units if not unit.frozen)
    file = state_file(plan)
    return Bytes(
        parameters=shards if layout.offload_params == "cpu" else 0,
        gradients=trained * DTYPE_BYTES[plan.dtypes.gradients] if accumulates_on_host(plan) else 0,
        optimizer=arrays * wide * elements * (layout.offload_home == "cpu") + outer_state_bytes(plan),
        saved=saved,
        comm=(BUFFERS * file.buffer_bytes if file else 0)
        + sum(parameter_buffers(plan).values())
        + gradient_chunk(plan) * wide,
    )


def disk_bytes(plan: UnitPlan) -> Bytes:
    """Bytes of the rank's file, both slots of its state included."""
    file = state_file(plan)
    return Bytes() if file is None else Bytes(parameters=file.parameter_bytes, optimizer=file.state_bytes)
