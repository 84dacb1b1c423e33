"""Tensor- and sequence-parallel communication around operations, as the layout's table composes it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardwise.layout import tensor
from shardwise.layout.axes import TP
from shardwise.layout.layout import Layout
from shardwise.ops.context import COMPLETE, LOCAL, Around, Pending, Redistribute
from shardwise.runtime.transport.comms import Comms

SEQUENCE_DIM = 1


class _OverTP(Redistribute):
    def __init__(self, comms: Comms, unit: str) -> None:
        self.comms, self.unit = comms, unit


class Copy(_OverTP):
    """Every rank uses the tensor; its gradient is the sum of the ranks'."""

    def backward(self, grad: Tensor) -> tuple[Tensor, Pending]:
        return grad, self.comms.all_reduce(grad, TP, self.unit, later=True)


class Sum(_OverTP):
    """The sum of the ranks' parts, on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        self.comms.all_reduce(x, TP, self.unit)
        return x


class GatherSequence(_OverTP):
    """Whole sequences of the ranks' shards."""

    def forward(self, x: Tensor) -> Tensor:
        return self.comms.gather_dim(x, SEQUENCE_DIM, TP, self.unit)

    def backward(self, grad: Tensor) -> tuple[Tensor, Pending]:
        return self.comms.reduce_scatter_dim(grad, SEQUENCE_DIM, TP, self.unit), COMPLETE


class ScatterSequence(_OverTP):
    """The sum of the ranks' parts, of which each keeps its shard of the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return self.comms.reduce_scatter_dim(x, SEQUENCE_DIM, TP, self.unit)

    def backward(self, grad: Tensor) -> tuple[Tensor, Pending]:
        return self.comms.gather_dim(grad, SEQUENCE_DIM, TP, self.unit), COMPLETE


class GatherOutputs(_OverTP):
    """All outputs of a map of which each rank computes some. width: their number, without padding."""

    def __init__(self, comms: Comms, unit: str, width: int) -> None:
        super().__init__(comms, unit)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return self.comms.gather_dim(x, x.dim() - 1, TP, self.unit)[..., : self.width]


_CLASSES: dict[tensor.Redistribution, type[_OverTP]] = {
    "copy": Copy,
    "sum": Sum,
    "gather sequence": GatherSequence,
    "scatter sequence": ScatterSequence,
}


def compose(layout: Layout, comms: Comms, unit: str) -> Mapping[str, Around]:
    """Cut of a weight, or "lookup" -> the communication around its map in a part."""

    def of(name: tensor.Redistribution) -> Redistribute:
        return LOCAL if name == "none" else _CLASSES[name](comms, unit)

    return {
        cut: Around(of(edges.enter), of(edges.leave), late_bias=cut == "row")
        for cut, edges in tensor.edges(layout).items()
    }
