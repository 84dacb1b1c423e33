"""Outer steps of `sync=local`: the state that a rank keeps for them, and what replicas send each other. Free of torch.

Replicas train apart from each other. After every H-th step the mean of what they have learned, the outer gradient,
moves the weights that all of them had before. Sources: Stich 2019 (local SGD), Douillard et al. 2023 (DiLoCo),
Douillard et al. 2025 (Streaming DiLoCo: outer gradients in 4 bits).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.layout.axes import REPLICA, Axes
from shardwise.layout.wire import WIRE_DTYPE, PackedRun, packed_runs
from shardwise.records import dataclass

if TYPE_CHECKING:
    from shardwise.layout.unit import Unit
    from shardwise.layout.units import UnitPlan

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""Learning rate and momentum of `outer=nesterov` (DiLoCo, table 5)."""
Exchange = tuple[str, Axes, str, int]
"""A collective of an outer step: operation, axes, dtype, elements."""


@dataclass(frozen=True)
class OuterPieces:
    """A unit's interval in equal pieces, one for each replica, which sums up its own and packs the sum again."""

    cuts: tuple[tuple[tuple[int, int], ...], ...]
    """Piece -> its runs [start, stop), relative to its first element; blocks of the wire lie inside a run."""
    elements: int
    """Elements of a piece; the last ones may be shorter."""
    nbytes: int
    """Packed bytes of a piece: the most of any rank's."""
    bits: int

    @property
    def count(self) -> int:
        return len(self.cuts)

    def runs(self, piece: int) -> tuple[PackedRun, ...]:
        """Runs of a piece's elements, and their bytes in the packed piece."""
        return packed_runs(self.cuts[piece], self.bits)


def keeps_base(plan: UnitPlan) -> bool:
    """Whether a rank keeps the weights of the last outer step. A plain mean of weights does without."""
    return plan.layout.local_sgd and (plan.layout.outer == "nesterov" or _bits(plan) > 0)


def keeps_momentum(plan: UnitPlan) -> bool:
    return plan.layout.local_sgd and plan.layout.outer == "nesterov"


def averaged_moments(plan: UnitPlan) -> int:
    """Moments per parameter whose mean over the replicas an outer step makes, as wide as the master weights."""
    averages = plan.layout.local_sgd and plan.layout.moments == "average"
    return len(plan.workload.states) - 1 if averages and plan.layout.independent > 1 else 0


def outer_pieces(plan: UnitPlan, unit: Unit, place: int = 0) -> OuterPieces | None:
    """The pieces of a unit's interval under `outer_bits`; None where outer gradients are summed as they are. place: of
    the rank among those that ZeRO shards the unit over."""
    bits = _bits(plan)
    if not bits:
        return None
    every = [_cut(unit, at, plan.layout.independent) for at in range(unit.shard_ranks)]
    longest = max(packed_runs(runs, bits)[-1].packed.stop for cuts in set(every) for runs in cuts if runs)
    return OuterPieces(every[place], -(-unit.shard_numel // plan.layout.independent), longest, bits)


def outer_residuals(plan: UnitPlan, unit: Unit) -> tuple[int, int]:
    """Elements of the errors that a rank keeps in fp32: of its own outer gradient, and of the sum that it packs."""
    pieces = outer_pieces(plan, unit)
    return (unit.shard_numel, pieces.elements) if pieces else (0, 0)


def outer_exchanges(plan: UnitPlan, unit: Unit) -> Iterator[Exchange]:
    """The collectives that make the sums of a unit's outer gradients and of its moments."""
    pieces = outer_pieces(plan, unit)
    for _ in range(averaged_moments(plan) + (pieces is None)):
        yield "all_reduce", REPLICA, plan.dtypes.master, unit.shard_numel
    if pieces is not None:
        for op in ("all_to_all", "all_gather_into"):
            yield op, REPLICA, WIRE_DTYPE, pieces.count * pieces.nbytes


def _bits(plan: UnitPlan) -> int:
    """Bits on the wire; 0 also where there is no other rank to send to."""
    return plan.layout.outer_bits if plan.layout.local_sgd and plan.layout.independent > 1 else 0


def _cut(unit: Unit, place: int, pieces: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    each = -(-unit.shard_numel // pieces)
    cuts = []
    for first in range(0, each * pieces, each):
        parts = ((max(start, first), min(stop, first + each)) for start, stop in unit.block_cuts[place])
        cuts.append(tuple((start - first, stop - first) for start, stop in parts if start < stop))
    return tuple(cuts)
