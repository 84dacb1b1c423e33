"""Buffers that a transport needs, without torch: for the runtime and the prediction.

Full gradients that are not accumulated where they are computed are staged, each unit's in a buffer of its own that is
allocated with its first gradient and freed by its reduction. Where peers read the buffers in place, units instead take
two lasting ones in turn, in the order of their backwards, and so do experts; a tied weight and the root of a user's
module, whose gradients wait longer, have their own.
Under a pipeline whole stages wait for their reduction, so that nothing is lasting.

Ranks that share a GPU have the buffers of NCCL there, and others in the host's memory (`staging_bytes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwise.layout.axes import SHARD
from shardwise.layout.gradients import packed_gradients, trained_units
from shardwise.report.step_report import DTYPE_BYTES

if TYPE_CHECKING:
    from shardwise.layout.unit import Unit
    from shardwise.layout.units import UnitPlan


STAGED = ", staged"
"""End of a realization's name in reports, where tensors go through the host's memory."""
SUMMED_FROM = 4
"""Bytes per element in which sums are staged at least: gradients of 16 bits may be added to fp32."""
ALIGNED = 64
"""Bytes at whose multiples the parts of a staging buffer begin."""


def aligned(nbytes: int) -> int:
    """Bytes of a part of a staging buffer."""
    return -(-nbytes // ALIGNED) * ALIGNED


def staging_bytes(op: str, nbytes: int, ranks: int, item: int) -> int:
    """Bytes of host memory through which one collective of ranks that share a device goes.

    op: of the ledger. nbytes: of the full tensor (each of `ranks` has an equal part); item: of an element.
    Messages have their own memory: 0.
    """
    whole, piece = aligned(nbytes), nbytes // ranks
    if op == "reduce_scatter":
        return whole + aligned(piece // item * max(item, SUMMED_FROM))
    return {"all_reduce": whole, "all_gather_into": whole + aligned(piece), "all_to_all": 2 * whole}.get(op, 0)


class TransportBuffers(NamedTuple):
    """Buffers of one rank, in elements."""

    staged: dict[str, str]
    """Unit -> the buffer in which its full gradient is staged; empty where gradients are accumulated in place."""
    sizes: dict[str, int]
    """Staging buffer -> elements."""
    dtype: str
    """dtype of staged gradients."""
    lasting: bool
    """Whether staging buffers are there all through training."""
    receives: bool
    """Whether a reduce-scatter receives the peers' pieces in memory of its own.

    gloo's own reduce-scatter is slower than its all-reduce, so there it is an all-to-all and a local sum in rank order
    (in fp32 for bf16 pieces). NCCL's needs none.
    """

    def room(self, plan: UnitPlan, unit: Unit) -> int:
        """Bytes of the peers' pieces while a unit is reduced; under qgz also of its own packed ones."""
        if packed := packed_gradients(plan, unit):
            return 2 * unit.shard_ranks * packed
        return unit.padded * DTYPE_BYTES[plan.dtypes.wire] if self.receives and unit.shard_ranks > 1 else 0


def transport_buffers(plan: UnitPlan) -> TransportBuffers:
    """The buffers of `plan`'s rank."""
    stage = plan.layout.stage
    if not plan.trains:
        return TransportBuffers({}, {}, plan.layout.dtype, False, False)
    receives = stage > 0 and plan.backend == "gloo" and plan.schedules.of("reduce_scatter", SHARD) is None
    # Peers do not read staged gradients in place: packed ones are sent.
    lasting = stage == 3 and plan.layout.pp == 1 and plan.backend == "shared" and not plan.layout.qgz
    if lasting:
        around = [name for name in ("tied", *plan.of_kind("root")) if name in plan.by_name]
        staged = dict(zip(around, around, strict=True))
        turns = [part for part in reversed(plan.parts) if part in plan.by_name and part not in around]
        for turn, part in enumerate(turns):
            staged |= {
                unit.name: ("even", "odd")[turn % 2] + unit.name.removeprefix(part)
                for unit in trained_units(plan, part)
                if unit.name != "tied"
            }
    else:
        staged = {u.name: u.name for u in plan.units if not u.frozen} if plan.dtypes.stages_gradients else {}
    sizes = dict.fromkeys(staged.values(), 0)
    for name, buffer in staged.items():
        sizes[buffer] = max(sizes[buffer], plan.by_name[name].padded)
    return TransportBuffers(staged, sizes, plan.layout.dtype, lasting, receives)
