"""Kinds of tensor parallelism as tables: the dim that each cut splits, and what is communicated around each map.

Placement, runtime and predictions all read them. megatron: column-parallel splits outputs, row-parallel inputs (Shoeybi
et al. 2019); under sequence parallelism the residual stream is sharded along the sequence (Korthikanti et al. 2022).
gathered, the older form: every map of a block is column-parallel, its outputs are gathered and its input's gradient is
summed, so that each rank has whole activations. The vocabulary is split as in the Megatron form.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from shardwise.layout.layout import Layout
from shardwise.model.blueprint import Parameter
from shardwise.model.operations import LinearOp, Operation

Redistribution = Literal[
    "none", "copy", "sum", "gather sequence", "scatter sequence", "gather outputs", "split inputs"
]  # fmt: skip
"""Communication at the edge of an operation; the gradient gets the adjoint. copy: every rank uses the tensor, its
gradient is summed; sum: of the ranks' partial results; gather and scatter sequence: shards of the residual stream
become whole sequences, whole sequences are summed into shards; gather outputs: of a map whose outputs are split over
ranks; split inputs: each rank takes its part of a tensor that all have."""


class Edges(NamedTuple):
    """Redistribution before and after one kind of map."""

    enter: Redistribution = "none"
    leave: Redistribution = "none"


_COLUMN, _ROW = Edges("copy", "none"), Edges("none", "sum")
_GATHERED = Edges("copy", "gather outputs")
_VOCABULARY = {"vocab": _COLUMN, "lookup": _ROW}
EDGES = {
    "megatron": {
        "column": _COLUMN, "kv heads": _COLUMN, "row": _ROW, "statistics": _ROW, "shared key": Edges("none", "copy"),
        **_VOCABULARY,
    },
    "gathered": {"column": _GATHERED, "kv heads": _GATHERED, "row": _GATHERED, "statistics": Edges(), **_VOCABULARY},
}  # fmt: skip
"""Kind of tensor parallelism -> cut of a map's weight, or "lookup" -> its edges, without sequence parallelism.
statistics: sums that a norm over the heads of several ranks needs, of whole sequences. shared key: the part of latent
attention's keys that all heads use; no product reads it, so that it is gathered once."""
_SEQUENCE: dict[Redistribution, Redistribution] = {"copy": "gather sequence", "sum": "scatter sequence"}


def edges(layout: Layout) -> Mapping[str, Edges]:
    """Cut of a map's weight, or kind of another operation -> its edges."""
    table = EDGES[layout.tpkind]
    if layout.tp == 1:
        return dict.fromkeys(table, Edges())
    if not layout.sp:
        return table
    around = {cut: Edges(*(_SEQUENCE.get(edge, edge) for edge in both)) for cut, both in table.items()}
    return around | {"statistics": table["statistics"]}


def split_dim(parameter: Parameter, layout: Layout) -> int | None:
    """The dim of a parameter that tensor parallelism splits; None for one that every rank holds whole. Where outputs
    are gathered, vectors are whole: a bias is added to all outputs."""
    whole = layout.gathers_outputs and len(parameter.shape) == 1
    if layout.tp == 1 or whole or parameter.cut == "replicated":
        return None
    dim = 1 if parameter.cut == "row" and not layout.gathers_outputs else 0
    return 1 - dim if parameter.transposed else dim


class MapCollective(NamedTuple):
    """A collective of one map over the tensor-parallel ranks, in one pass."""

    phase: Literal["forward", "backward"]
    op: Literal["all_reduce", "all_gather_into", "reduce_scatter"]
    width: Any
    """Elements per token of the full tensor."""


def collectives(
    operation: Operation, table: Mapping[str, Edges], tp: Any, split_experts: bool = False
) -> list[MapCollective]:
    """The collectives of an operation. Recomputation repeats the collectives of its forward pass.

    table: cut of a weight -> edges; tp: a degree, or an array of degrees, of which the widths are then arrays.
    split_experts: whether experts are split as all else is.
    """
    cut, inputs, outputs = _widths(operation, ("tokens", "routed") if split_experts else ("tokens",))
    enter, leave = table.get(cut, Edges())
    found = []
    if enter == "copy":
        found = [MapCollective("backward", "all_reduce", inputs)]
    elif enter == "gather sequence":
        found = [
            MapCollective("forward", "all_gather_into", inputs),
            MapCollective("backward", "reduce_scatter", inputs),
        ]
        if isinstance(operation, LinearOp) and operation.trains:  # gathered again for the gradient of the weight
            found.append(MapCollective("backward", "all_gather_into", inputs))
    for width in outputs:
        if leave == "sum":
            found.append(MapCollective("forward", "all_reduce", width))
        elif leave == "scatter sequence":
            found.append(MapCollective("forward", "reduce_scatter", width))
            if operation.kind != "lookup" or not operation.frozen:
                found.append(MapCollective("backward", "all_gather_into", width))
        elif leave == "copy":
            found.append(MapCollective("backward", "all_reduce", width))
        elif leave == "gather sequence":
            found.append(MapCollective("forward", "all_gather_into", width))
            found.append(MapCollective("backward", "reduce_scatter", width))
        elif leave == "gather outputs":
            found.append(MapCollective("forward", "all_gather_into", -(-width // tp) * tp))
    return found


def _widths(operation: Operation, split: tuple[str, ...]) -> tuple[str, int, list[int]]:
    """(cut of an operation's weights, or its kind; width of its input; widths of its outputs). split: the rows whose
    weights are cut."""
    if operation.kind == "lookup":
        return "lookup", 0, [width.size for width in operation.widths]
    if operation.kind == "shared key":
        return "shared key", 0, [operation.widths[0].size]
    if operation.kind == "logits":
        return "vocab", operation.inputs.size, []
    if operation.kind != "linear" or operation.rows not in split:
        return "replicated", 0, []
    cut = "row" if operation.inputs.cut else "column" if operation.outputs[0].cut else "replicated"
    return cut, operation.inputs.size, [width.size for width in operation.outputs]
