"""Bytes that a rank holds in one training step, by class, in closed form; and the peak.

A class is the most that is there of it at one time; the peak is less than their sum, since gradients come as saved
activations go (`predict/memory/buffers.py`).
Parameters, gradients, optimizer state, communication buffers and saved activations are exact (a test holds each to a
measured step). The peak adds what is transient at the worst moment; it is held to 5%.
"""

from dataclasses import replace

from shardwise.layout.gathers import packed_bytes, packed_slot_bytes, slot_bytes
from shardwise.layout.gradients import residuals
from shardwise.layout.homes import accumulates_on_host, is_master, on_device
from shardwise.layout.optimizers import DEFAULT, states_of
from shardwise.layout.units import UnitPlan
from shardwise.predict.memory.activations import saved_bytes
from shardwise.predict.memory.outer import outer_state_bytes
from shardwise.predict.memory.peak import moments
from shardwise.predict.traffic.schedules import workspace_bytes
from shardwise.report.step_report import DTYPE_BYTES, Bytes


def state_bytes(precision: str, optimizer: str) -> int:
    """An optimizer's bytes per parameter: its moments, and for bf16 weights an fp32 master."""
    arrays = len(states_of(optimizer)) - (precision != "bf16")
    return arrays * DTYPE_BYTES["float64" if precision == "fp64" else "float32"]


OPTIMIZER_BYTES = {precision: state_bytes(precision, DEFAULT) for precision in ("bf16", "fp32", "fp64")}
"""AdamW's."""

OUTER = "outer"
"""Name of the state of outer steps among the arrays of optimizer state."""


def predict_bytes(plan: UnitPlan) -> Bytes:
    """Bytes by class of `plan`'s rank, and what they add up to at the peak."""
    held = _without_workspace(plan)
    return replace(held, comm=held.comm + workspace_bytes(plan)) if plan.schedules.named else held


def _without_workspace(plan: UnitPlan) -> Bytes:
    # The shorter step has the same units.
    units = plan.short if plan.layout.pp > 1 else plan
    lasting = {"parameters": parameter_bytes(units), "optimizer": optimizer_bytes(units)}
    if plan.layout.pp > 1:
        from shardwise.predict.memory.pipeline import held_by_actions

        held, packed = held_by_actions(plan), kept_pieces(units)
        return Bytes.of(
            sum(lasting.values()) + packed + held.peak,
            **lasting, gradients=held.gradients, comm=held.comm + packed, saved=held.saved,
        )  # fmt: skip
    slots = sum(packed_slot_bytes(plan).values()) + kept_pieces(plan) + (plan.layout.stage == 3) * slot_bytes(plan)
    step = list(moments(plan))
    return Bytes.of(
        sum(lasting.values()) + slots + max(held.total + beside for held, beside in step),
        **lasting, gradients=gradient_bytes(plan), comm=slots + max(held.comm for held, _ in step),
        saved=saved_bytes(plan),
    )  # fmt: skip


def parameter_bytes(plan: UnitPlan) -> int:
    """Weights: whole, in compute precision; at stage 3 one interval of each unit in the optimizer's precision, which is
    what gathers of bf16 weights are rounded from, and its part of the second copy under hpz. With offloaded state the
    interval is in compute precision, and it may be off the device, too. Frozen weights always are in compute
    precision, or in their base's format."""
    if plan.layout.stage == 3:
        copies = sum(unit.copy_numel * DTYPE_BYTES[plan.dtypes.gathered(unit)] for unit in plan.units)
        here = not plan.layout.offloads_params
        return here * sum(unit.shard_numel * DTYPE_BYTES[plan.dtypes.of(unit)] for unit in plan.units) + copies
    return sum(unit.padded * DTYPE_BYTES[plan.dtypes.gathered(unit)] for unit in plan.units)


def gradient_bytes(plan: UnitPlan) -> int:
    """Gradient accumulators when all are there: whole, or one interval of each unit from stage 2 on. None of those from
    which the host's cores update."""
    if accumulates_on_host(plan):
        return 0
    sharded = plan.layout.stage >= 2
    elements = sum(unit.shard_numel if sharded else unit.padded for unit in plan.units if not unit.frozen)
    return elements * DTYPE_BYTES[plan.dtypes.gradients]


def optimizer_arrays(plan: UnitPlan) -> dict[str, int]:
    """Bytes of each array of what this rank updates on the device: `states_of`, without master weights where parameters
    are these, and `OUTER`, the state of outer steps. Empty where parameter servers have them."""
    if plan.layout.served:
        return {}
    each = sum(on_device(plan, unit) for unit in plan.units) * DTYPE_BYTES[plan.dtypes.master]
    arrays = dict.fromkeys(plan.workload.states[is_master(plan) :], each)
    outer = outer_state_bytes(plan) if plan.layout.offload_home == "none" else 0
    return arrays | ({OUTER: outer} if outer else {})


def optimizer_bytes(plan: UnitPlan) -> int:
    """Sum of `optimizer_arrays`."""
    return sum(optimizer_arrays(plan).values())


def kept_pieces(plan: UnitPlan) -> int:
    """Bytes of a rank's own packed weights, which stay while gathered ones come and go, and of the errors that it feeds
    back into the next packed gradients."""
    errors = sum(sum(residuals(plan, unit)) for unit in plan.units)
    return sum(packed_bytes(plan, unit) for unit in plan.units) + errors * DTYPE_BYTES["float32"]
