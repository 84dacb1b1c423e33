"""Tokens, a product over tensor-parallel ranks: columns of the first matrix, rows of the second, and the sum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.codec import Json
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.report.units import format_bytes, format_time
from shardwise.studio.columns import How, Table
from shardwise.studio.data.tokens_holdings import ParameterShard
from shardwise.studio.data.tokens_layer import LayerStep

FIRST, SECOND = ("mlp.gate_up.up.weight", "mlp.up.up.weight"), "mlp.down.weight"
"""Names of the matrices of the feed-forward part; a model has one of the first ones."""


class Slice(NamedTuple):
    """Part of both matrices on a rank: columns [start, stop) of W1, and these rows of W2."""

    rank: int
    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True)
class DrawnProduct(Json):
    """x W1, then times W2, on the ranks of one tensor-parallel group. seconds: of the sum."""

    json_keys = "layout hidden ffn slices sentences"

    layout: Layout
    hidden: int
    ffn: int
    slices: list[Slice]
    vector: int
    seconds: float

    @property
    def sentences(self) -> list[str]:
        ranks, most = len(self.slices), max(one.stop - one.start for one in self.slices)
        return [
            f"Every one of the {ranks} ranks has the whole vector x, {self.hidden:,} numbers.",
            f"Each multiplies x with its columns of W1: {most:,} of the {self.ffn:,} numbers of h. No other rank needs "
            "them, since the activation goes number by number.",
            f"Its rows of W2 fit just these numbers: each rank has a partial sum of all {self.hidden:,} numbers of y.",
            f"An all-reduce adds the {ranks} partial sums up, {format_bytes(self.vector)} a token in "
            f"{format_time(self.seconds)}: now every rank has y.",
        ]


def product(
    model: ModelConfig,
    layouts: Sequence[Layout],
    holdings: Sequence[list[ParameterShard]],
    sides: Sequence[list[LayerStep]],
) -> DrawnProduct | None:
    """The product of the first strategy that has tensor parallelism over ranks that are drawn; None without one."""
    for layout, held, steps in zip(layouts, holdings, sides, strict=True):
        if layout.tp == 1 or layout.stage == 3:
            continue
        width = DTYPE_BYTES[layout.dtype]
        first = {piece.rank: piece for piece in held if piece.name in FIRST}
        second = {piece.rank: piece for piece in held if piece.name == SECOND}
        slices = [
            Slice(rank, one.start, one.stop, (one.elements + second[rank].elements) * width)
            for rank, one in sorted(first.items())[: layout.tp]
        ]
        summed = next((step.seconds for step in steps if step.act in ("sum", "send") and step.seconds), 0.0)
        if len(slices) == layout.tp:
            return DrawnProduct(layout, model.hidden, model.ffn, slices, model.hidden * width, summed)
    return None


def product_table(shown: DrawnProduct | None) -> Table:
    """A row for each rank."""
    units = {"rank": "", "columns of W1 from": "", "to": "", "of both matrices": "bytes", "partial sum": "bytes"}
    rows = [(*one, shown.vector) for one in shown.slices] if shown else []
    return Table.of_rows("Columns of W1 are the rows of W2", units, rows)


def how_product(shown: DrawnProduct | None) -> How:
    """Why there is one sum, and no other."""
    if not shown:
        return How(["Neither strategy cuts matrices over tensor-parallel ranks."])
    lines = [
        "y = f(x W1) W2 = the sum over ranks r of f(x W1[:, r]) W2[r, :], as f goes number by number.",
        f"W1 is {shown.hidden:,} x {shown.ffn:,}: the up matrix (the gate is cut equally); W2, the down matrix, is "
        f"{shown.ffn:,} x {shown.hidden:,}. As stored (outputs are rows) columns of W1 are rows.",
        f"{shown.layout}: the slices are the runtime's; the sum's seconds are the step's.",
    ]
    return How(lines, "", "Shoeybi et al. 2019, section 3")
