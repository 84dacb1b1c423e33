"""A traced module as the stages of a pipeline: whether it can be cut, and what was recorded of its parts in a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from shardwise.errors import UserError
from shardwise.model.trace import TracedCollective, TracedStep
from shardwise.model.traced_stages import Pair, TracedMessage, TracedPeak, TracedStages, TracedTensors
from shardwise.runtime.module.chain import ENTRY, EXIT, Chain, find_chain
from shardwise.runtime.module.describe import ROOT
from shardwise.runtime.module.stage_recorder import MICRO_BATCHES, RawStages

K = TypeVar("K")


def traced_chain(
    module: nn.Module, parts: Sequence[str | nn.Module] | None, blocks: Sequence[str]
) -> tuple[Chain | None, str]:
    """(the order of a module's parts, "") or (None, why there are no predictions for its pipelines). Raises `UserError`
    for a list of parts that is none."""
    if parts is None and not getattr(module, "_pp_plan", None):
        return None, f"{type(module).__name__} publishes no order of its parts: trace it with --parts"
    try:
        chain = find_chain(module, parts, blocks)
    except UserError as error:
        if parts is not None:
            raise
        return None, str(error)
    if list(chain.blocks) != list(blocks):
        return None, "its blocks are not what its list of parts has in a row: name them with blocks="
    if any(not parameter.requires_grad for parameter in module.parameters()):
        return None, "some of its parameters are frozen: leave pp out"
    return chain, ""


def joined_stages(step: TracedStep, one: RawStages, other: RawStages) -> dict[str, Any]:
    """Fields of the traced step from what was recorded at both sizes. Raises `UserError` where these differ."""
    stages = TracedStages(
        tuple(TracedTensors(*who, pair) for who, pair in _pairs(one.tensors, other.tensors)),  # type: ignore[arg-type]
        tuple(TracedPeak(when, part, pair) for (when, part), pair in _pairs(one.peaks, other.peaks)),
        tuple(
            TracedMessage(part, dtype, (elements, other.messages[part][1]), part in one.kept)
            for part, (dtype, elements) in one.messages.items()
        ),
        (one.buffers, other.buffers),
    )
    ends = list(_of_ends(one, other))
    return {"stages": stages, "collectives": (*(c for c in step.collectives if c.unit != ROOT), *ends)}


def _pairs(one: Mapping[K, int], other: Mapping[K, int]) -> list[tuple[K, Pair]]:
    if one.keys() != other.keys():
        raise UserError(
            "its parts keep other tensors for other numbers of rows, so its pipelines cannot be predicted: trace it "
            "without parts="
        )
    return [(key, (value, other[key])) for key, value in one.items()]


def _of_ends(one: RawStages, other: RawStages) -> list[TracedCollective]:
    """Collectives of the root's maps, by the end that has them."""
    rows = [_rows(raw) for raw in (one, other)]
    return [
        TracedCollective(phase, op, ROOT, dtype, (elements, large[-1]), count // MICRO_BATCHES, end, group)
        for ((phase, op, end, group, dtype, elements), count), (large, _) in zip(*rows, strict=True)
    ]


def _rows(raw: RawStages) -> list[tuple[tuple[Any, ...], int]]:
    counts: Counter[tuple[Any, ...]] = Counter()
    for row in raw.ledger:
        if row.phase in ("forward", "backward") and row.unit in (ENTRY, EXIT):
            counts[row.phase, row.op, row.unit, row.axes, row.dtype, row.elements] += row.count
    return sorted(counts.items())
