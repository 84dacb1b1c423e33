"""Bytes that a rank sends for its ledger's rows when every collective goes round a ring, as exact fractions.

Ring volume is what bandwidth-optimal algorithms send: 2 (p-1)/p n for an all-reduce, (p-1)/p n for an all-gather
(docs/collectives.md). Shards are counted without the padding that makes them equal: it depends on the number of ranks,
not on the strategy.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from shardwise.codec import Json
from shardwise.layout.axes import named
from shardwise.layout.units import UnitPlan
from shardwise.report.step_report import DTYPE_BYTES, LedgerRow


@dataclass(frozen=True)
class Volume(Json):
    """Bytes that one rank sends in a turn. blocks: for the blocks, messages between stages included. edges: for
    embedding, head and logits. other: control, and the tokens that were chosen."""

    json_keys = "* total"

    blocks: Fraction = Fraction(0)
    edges: Fraction = Fraction(0)
    other: Fraction = Fraction(0)

    @property
    def total(self) -> Fraction:
        return self.blocks + self.edges + self.other

    def over(self, count: int) -> "Volume":
        return Volume(self.blocks / count, self.edges / count, self.other / count)


def ring_bytes(row: LedgerRow, plan: UnitPlan) -> Fraction:
    """Bytes that one rank sends for a row of its ledger. A received message costs its receiver nothing."""
    mesh = plan.mesh
    ranks = mesh.size(named(row.axes))
    elements, unit = row.elements, plan.by_name.get(row.unit)
    if row.op == "all_gather_into" and unit and row.axes == mesh.name(unit.sharded_over):
        elements = unit.numel
    return ring_share(row.op, ranks) * elements * DTYPE_BYTES[row.dtype] * row.count


def ring_share(op: str, ranks: int) -> Fraction:
    """Part of a collective's payload that each of `ranks` sends."""
    return {
        "all_reduce": Fraction(2 * (ranks - 1), ranks),
        "all_gather_into": Fraction(ranks - 1, ranks),
        "reduce_scatter": Fraction(ranks - 1, ranks),
        "all_to_all": Fraction(ranks - 1, ranks),
        "broadcast": Fraction(ranks - 1, ranks),
        "send": Fraction(1),
        "recv": Fraction(0),
    }[op]


def ring_volume(ledger: Iterable[LedgerRow], plan: UnitPlan) -> Volume:
    """Bytes that a rank sends for its whole ledger."""
    sums = {"blocks": Fraction(0), "edges": Fraction(0), "other": Fraction(0)}
    for row in ledger:
        sums[kind_of(row)] += ring_bytes(row, plan)
    return Volume(**sums)


def payload(ledger: Iterable[LedgerRow]) -> dict[str, int]:
    """Payload bytes by kind: of the full tensors, whatever crosses a wire; messages once, where they are sent."""
    sums = {"blocks": 0, "edges": 0, "other": 0}
    for row in ledger:
        if row.op != "recv":
            sums[kind_of(row)] += row.payload_bytes
    return sums


def kind_of(row: LedgerRow) -> str:
    """Whether a row serves the blocks, the edges of the model, or neither."""
    if row.unit.startswith(("blocks.", "stage ")):
        return "blocks"
    return "edges" if row.unit in ("embedding", "head", "tied", "logits") else "other"
