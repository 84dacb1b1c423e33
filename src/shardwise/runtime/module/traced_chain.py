"""A traced module as the stages of a pipeline: whether it can be cut, and what was recorded of its parts in a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from shardwise.errors import UserError
from shardwise.model.trace import TracedCollective, TracedStep
from shardwise.model.traced_stages import Pair, TracedMessage, TracedPeak, TracedStages, TracedTensors
from shardwise.report.step_report import LedgerRow
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
    ends = [
        TracedCollective(phase, op, ROOT, dtype, (elements, more), count // MICRO_BATCHES, end, group)
        for (phase, op, group, end, dtype, elements), more, count in same_calls(
            *(call_counts(raw.calls, (ENTRY, EXIT)) for raw in (one, other))
        )
    ]
    return {"stages": stages, "collectives": (*(c for c in step.collectives if c.unit != ROOT), *ends)}


def _pairs(one: Mapping[K, int], other: Mapping[K, int]) -> list[tuple[K, Pair]]:
    if one.keys() != other.keys():
        raise UserError(
            "its parts keep other tensors for other numbers of rows, so its pipelines cannot be predicted: trace it "
            "without parts="
        )
    return [(key, (value, other[key])) for key, value in one.items()]


CallCounts = Counter[tuple[Any, ...]]
"""(phase, operation, group, unit, dtype, elements) -> calls, in the order of the first ones."""


def call_counts(calls: Sequence[LedgerRow], units: Sequence[str] = ()) -> CallCounts:
    """Calls of both passes. units: of these alone."""
    counts: CallCounts = Counter()
    for row in calls:
        if row.phase in ("forward", "backward") and (not units or row.unit in units):
            counts[row.phase, row.op, row.axes, row.unit, row.dtype, row.elements] += row.count
    return counts


def same_calls(one: CallCounts, other: CallCounts) -> Iterator[tuple[tuple[Any, ...], int, int]]:
    """(key, elements of the same call at the other size, calls): the n-th of one kind and unit is the n-th at any size.
    Raises `UserError` where these differ."""
    by_kind: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for (*kind, elements), count in other.items():
        by_kind.setdefault(tuple(kind), []).append((elements, count))
    for key, count in one.items():
        more, times = (by_kind.get(key[:-1]) or [(0, 0)]).pop(0)
        if times != count or len(one) != len(other):
            raise UserError(
                "its collectives differ between numbers of rows: trace an example with another one; split and verify "
                "run it all the same"
            )
        yield key, more, count
