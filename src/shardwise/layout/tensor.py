"""Tensor parallelism as a table: what is communicated around each kind of map, by the cut of its weight.

Runtime and prediction both read it. Column-parallel splits outputs, row-parallel inputs (Shoeybi et al. 2019); under
sequence parallelism the residual stream is sharded along the sequence (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from shardwise.layout.layout import Layout

Redistribution = Literal["none", "copy", "sum", "gather sequence", "scatter sequence"]
"""What happens to a tensor at the edge of an operation; backward its gradient gets the adjoint. copy: every rank uses
it, its gradient is summed; sum: of the ranks' parts; gather and scatter sequence: shards of the residual stream become
whole sequences, whole sequences are summed into shards."""


class Edges(NamedTuple):
    """Redistribution before and after one kind of map."""

    enter: Redistribution = "none"
    leave: Redistribution = "none"


_COLUMN, _ROW = Edges("copy", "none"), Edges("none", "sum")
_MEGATRON = {"column": _COLUMN, "kv heads": _COLUMN, "vocab": _COLUMN, "row": _ROW, "lookup": _ROW}
_STATISTICS = {"statistics": Edges(leave="sum")}
"""Sums that a norm over the heads of several ranks needs, of whole sequences."""
_SEQUENCE: dict[Redistribution, Redistribution] = {"copy": "gather sequence", "sum": "scatter sequence", "none": "none"}


def edges(layout: Layout) -> Mapping[str, Edges]:
    """Cut of a map's weight, or "lookup" -> its edges."""
    if layout.tp == 1:
        return dict.fromkeys((*_MEGATRON, *_STATISTICS), Edges())
    if not layout.sp:
        return _MEGATRON | _STATISTICS
    around = {cut: Edges(_SEQUENCE[edge.enter], _SEQUENCE[edge.leave]) for cut, edge in _MEGATRON.items()}
    return around | _STATISTICS
