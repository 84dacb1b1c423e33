"""Tokens, who holds what: the parts of a layer's matrices on each rank, from the plan that the runtime follows."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import PP, TP
from shardwise.layout.placement import Placed
from shardwise.layout.serving import plan_of
from shardwise.model import ModelConfig
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.report.units import format_bytes, format_count, format_share, format_spans
from shardwise.studio.columns import How, Table

MOST_DRAWN = 16
"""Ranks up to which it is drawn who holds what."""

BLOCK = "blocks.0"

Box = tuple[float, float, float, float]
"""(left, top, width, height) of a part of a matrix, as shares of its columns and rows. Columns are outputs: y = xW."""


class ParameterShard(NamedTuple):
    """A rank's part of one parameter of the first block."""

    rank: int
    name: str
    how: str
    """flat (an interval of elements), rows, columns, whole or nothing."""
    start: int
    stop: int
    elements: int
    boxes: tuple[Box, ...]
    """Place of the part in the matrix; empty for vectors."""


def pieces(model: ModelConfig, layout: Layout) -> list[ParameterShard]:
    """Parts of the first block on the ranks that hold it, up to rank `MOST_DRAWN`."""
    mesh = Mesh.of(layout, model)
    ranks = (rank for rank in range(min(layout.ranks, MOST_DRAWN)) if mesh.index(PP, rank) == 0)
    return [piece for rank in ranks for piece in _of_rank(model, mesh, rank)]


def _of_rank(model: ModelConfig, mesh: Mesh, rank: int) -> Iterator[ParameterShard]:
    unit = plan_of(model, mesh.layout, 0, mesh.index(TP, rank)).by_name[BLOCK]
    for offset, placed in zip(unit.offsets, unit.placed, strict=True):
        name, size = placed.name.removeprefix(f"{BLOCK}."), placed.numel
        if mesh.layout.stage == 3:
            low = mesh.index(unit.sharded_over, rank) * unit.shard_numel
            start, stop = max(low, offset) - offset, min(low + unit.shard_numel, offset + size) - offset
            held = max(0, stop - start)
            yield ParameterShard(
                rank, name, "flat" if held else "nothing", start, stop, held, _boxes(placed, start, stop)
            )
        elif not placed.dims:
            yield ParameterShard(rank, name, "whole", 0, size, size, _boxes(placed, 0, size))
        else:
            dim = placed.dims[0]
            how = "columns" if dim == 0 else "rows"  # stored as outputs by inputs
            yield ParameterShard(rank, name, how, *placed.box[dim], size, _boxes(placed, 0, size))


def _boxes(placed: Placed, start: int, stop: int) -> tuple[Box, ...]:
    """Elements [start, stop) of a rank's slice, row after row: a part of a row, whole rows, a part of a row."""
    if len(placed.shape) != 2 or stop <= start:
        return ()
    wide = placed.shape[1]
    (first, left), (last, right) = divmod(start, wide), divmod(stop, wide)
    if first == last:
        spans = [(first, first + 1, left, right)]
    else:
        spans = [(first, first + 1, left, wide)] * bool(left)
        spans += [(first + bool(left), last, 0, wide), (last, last + 1, 0, right)]
    boxes = (_box(placed, *span) for span in spans)
    return tuple(box for box in boxes if box[2] > 0 and box[3] > 0)


def _box(placed: Placed, top: int, bottom: int, left: int, right: int) -> Box:
    """Outputs [top, bottom) and inputs [left, right) of a slice, in the whole matrix; padding is left out."""
    outputs, inputs = placed.parameter.shape
    (first, last), (start, stop) = placed.box
    top, bottom = (min(first + output, last) for output in (top, bottom))
    left, right = (min(start + given, stop) for given in (left, right))
    return top / outputs, left / inputs, (bottom - top) / outputs, (right - left) / inputs


def matrices(model: ModelConfig) -> list[dict[str, Any]]:
    """The matrices of a block: name, rows, columns."""
    unit = plan_of(model, Layout()).by_name[BLOCK]
    return [
        {"name": placed.name.removeprefix(f"{BLOCK}."), "rows": placed.shape[1], "columns": placed.shape[0]}
        for placed in unit.placed
        if len(placed.shape) == 2
    ]


class DrawnDevice(NamedTuple):
    """A rank that is drawn."""

    rank: int
    stage: int
    layers: tuple[int, int]
    """Its layers: the first, and the one after the last."""
    share: float
    """Share of each of these layers' matrices, by area."""
    of_all: float
    """Share of all layers' matrices."""
    can: str
    """Use of what a rank holds, in two words: that it does not fit, where it does not."""


def devices(model: ModelConfig, layout: Layout, held: list[ParameterShard], fits: bool) -> list[DrawnDevice]:
    """The ranks that are drawn. held: `pieces` of the layout; fits: whether weights and cache fit a device."""
    mesh, shares = Mesh.of(layout, model), _shares(model, held)
    stages = [
        tuple(int(name.removeprefix("blocks.")) for name in plan_of(model, layout, stage).of_kind("block"))
        for stage in range(layout.pp)
    ]
    results = []
    for rank in range(min(layout.ranks, MOST_DRAWN)):
        stage, pipeline = mesh.index(PP, rank), mesh.group(PP, rank)
        layers, share = stages[stage], shares[pipeline[0]]
        results.append(
            DrawnDevice(
                rank,
                stage,
                (layers[0], layers[-1] + 1) if layers else (0, 0),
                share,
                share * len(layers) / model.layers,
                _can(layout, layers) if fits else "does not fit",
            )
        )
    return results


def _shares(model: ModelConfig, held: list[ParameterShard]) -> dict[int, float]:
    sizes = {matrix["name"]: matrix["rows"] * matrix["columns"] for matrix in matrices(model)}
    results: dict[int, float] = {}
    for piece in held:
        area = sum(width * height for _, _, width, height in piece.boxes)
        results[piece.rank] = results.get(piece.rank, 0.0) + area * sizes.get(piece.name, 0)
    return {rank: area / sum(sizes.values()) for rank, area in results.items()}


def _can(layout: Layout, layers: tuple[int, ...]) -> str:
    if layout.stage == 3 and layout.shard_ranks > 1:
        return "must gather"
    if layout.pp > 1:
        return f"layers {format_spans(tuple(n + 1 for n in layers))}" if layers else "no layer"
    return "can compute"


def holds_table(layouts: tuple[Layout, ...], holdings: list[list[ParameterShard]]) -> Table:
    """Every part of the first layer."""
    rows = [
        (str(layout), *piece[:-1], piece.elements * DTYPE_BYTES[layout.dtype])
        for layout, held in zip(layouts, holdings, strict=True)
        for piece in held
        if piece.how != "nothing"
    ]
    names = ("strategy", "rank", "parameter", "how", "from", "to", "elements", "bytes")
    return Table.of_rows("What each rank holds of the first layer", dict.fromkeys(names, "") | {"bytes": "bytes"}, rows)


def how_holds(model: ModelConfig, layouts: tuple[Layout, ...], sides: list[list[DrawnDevice]]) -> How:
    """Sizes of a rank's part of a layer, and its share of all layers."""
    lines = ["The units and slices that the runtime itself follows (UnitPlan); areas are shares of each matrix."]
    whole = plan_of(model, Layout()).by_name[BLOCK].numel
    for layout, ranks in zip(layouts, sides, strict=True):
        unit = plan_of(model, layout).by_name[BLOCK]
        held = unit.shard_numel if layout.stage == 3 else unit.numel
        lines.append(
            f"{layout}: {format_count(held)} of the block's {format_count(whole)} parameters a rank = "
            f"{format_bytes(held * DTYPE_BYTES[layout.dtype])}; rank 0 holds {format_share(ranks[0].of_all)} of all "
            "layers"
        )
    return How(lines)
