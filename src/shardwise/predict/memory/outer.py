"""Bytes of `sync=local`: what a rank keeps for outer steps, and what one needs for a moment."""

from shardwise.layout.outer import keeps_base, keeps_momentum, outer_pieces, outer_residuals
from shardwise.layout.unit import Unit, device_of
from shardwise.layout.units import UnitPlan
from shardwise.layout.wire import adding_bytes
from shardwise.report.step_report import DTYPE_BYTES


def outer_state_bytes(plan: UnitPlan) -> int:
    """Weights of the last outer step, momentum and residuals; on the host where optimizer state is offloaded."""
    arrays = (keeps_base(plan) + keeps_momentum(plan)) * DTYPE_BYTES[plan.dtypes.master]
    trained = [unit for unit in plan.units if not unit.frozen]
    residuals = sum(sum(outer_residuals(plan, unit)) for unit in trained)
    return arrays * sum(unit.shard_numel for unit in trained) + residuals * DTYPE_BYTES["float32"]


def outer_transient(plan: UnitPlan) -> int:
    """The most bytes that are transient in an outer step, which goes from unit to unit; 0 without one."""
    return max((_of(plan, unit) for unit in plan.units if not unit.frozen), default=0) if plan.layout.local_sgd else 0


def _of(plan: UnitPlan, unit: Unit) -> int:
    """One unit's outer gradient, and packed pieces to send and received ones."""
    gradient, pieces = unit.shard_numel * DTYPE_BYTES[plan.dtypes.master], outer_pieces(plan, unit)
    if pieces is None:
        return gradient
    longest = max(stop - start for runs in pieces.cuts for start, stop in runs)
    return gradient + 2 * pieces.count * pieces.nbytes + adding_bytes(longest, True, device_of(plan.backend))
