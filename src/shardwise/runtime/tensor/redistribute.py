"""Tensor- and sequence-parallel communication around operations, as the layout's table composes it."""

import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import tensor
from shardwise.layout.axes import TP
from shardwise.layout.units import UnitPlan
from shardwise.ops.context import COMPLETE, LOCAL, Around, Pending, Redistribute
from shardwise.runtime.transport.comms import Comms, gather_dim, reduce_scatter_dim

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
    """All-gather of the ranks' shards into whole sequences."""

    def forward(self, x: Tensor) -> Tensor:
        return gather_dim(self.comms, x, SEQUENCE_DIM, TP, self.unit)

    def backward(self, grad: Tensor) -> tuple[Tensor, Pending]:
        return reduce_scatter_dim(self.comms, grad, SEQUENCE_DIM, TP, self.unit), COMPLETE


class ScatterSequence(_OverTP):
    """The sum of the ranks' parts; each keeps its shard of the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return reduce_scatter_dim(self.comms, x, SEQUENCE_DIM, TP, self.unit)

    def backward(self, grad: Tensor) -> tuple[Tensor, Pending]:
        return gather_dim(self.comms, grad, SEQUENCE_DIM, TP, self.unit), COMPLETE


class GatherOutputs(_OverTP):
    """All outputs of a map that ranks compute in parts. width: their number, without padding."""

    def __init__(self, comms: Comms, unit: str, width: int) -> None:
        super().__init__(comms, unit)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        y = gather_dim(self.comms, x, x.dim() - 1, TP, self.unit)
        return y if y.shape[-1] == self.width else y[..., : self.width].contiguous()

    def backward(self, grad: Tensor) -> tuple[Tensor, Pending]:
        local = -(-self.width // self.comms.size(TP))
        start = self.comms.index(TP) * local
        mine = grad[..., start : start + local]
        # A copy, so that what is kept for the weights does not keep the whole.
        return F.pad(mine, (0, local - mine.shape[-1])) if mine.shape[-1] < local else mine.contiguous(), COMPLETE


class SplitInputs(GatherOutputs):
    """This rank's part of inputs that all ranks have; their gradient is gathered. width: their number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().backward(x)[0]

    def backward(self, grad: Tensor) -> tuple[Tensor, Pending]:
        return super().forward(grad), COMPLETE


_CLASSES: dict[tensor.Redistribution, type[_OverTP]] = {
    "copy": Copy,
    "sum": Sum,
    "gather sequence": GatherSequence,
    "scatter sequence": ScatterSequence,
}


def compose(plan: UnitPlan, comms: Comms, part: str) -> dict[str, Around]:
    """Global name of a weight of a part -> the communication around its map; "vocab" and "lookup" of the
    table's uses, "statistics" of norms over the heads of several ranks, "shared key" of latent attention."""
    table = tensor.edges(plan.layout)

    def around(cut: str, width: int) -> Around:
        return around_map(cut, table.get(cut, tensor.Edges()), comms, part, (width, width))

    weights = [p for p in plan.blueprint.parameters_of(part) if len(p.shape) > 1]
    found = {parameter.name: around(parameter.cut, parameter.shape[0]) for parameter in weights}
    return found | {use: around(use, plan.model.vocab) for use in ("vocab", "lookup", "statistics", "shared key")}


def around_map(cut: str, edges: tensor.Edges, comms: Comms, part: str, widths: tuple[int, int]) -> Around:
    """The communication around a map. widths: of its inputs and outputs."""
    enter, leave = (redistribution(edge, comms, part, width) for edge, width in zip(edges, widths, strict=True))
    return Around(enter, leave, late_bias=cut == "row" or edges.leave != "none")


def redistribution(edge: tensor.Redistribution, comms: Comms, part: str, width: int = 0) -> Redistribute:
    """The communication of an edge. width: outputs of the map where they are gathered, inputs where they are split."""
    if edge == "gather outputs":
        return GatherOutputs(comms, part, width)
    if edge == "split inputs":
        return SplitInputs(comms, part, width)
    return LOCAL if edge == "none" else _CLASSES[edge](comms, part)
