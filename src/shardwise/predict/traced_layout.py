"""Layouts of a traced module whose memory, traffic and time are predicted: a part of what `split` runs."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout, Workload, pipeline
from shardwise.layout.keys import KEYS, SEARCHED, changed
from shardwise.layout.layout import cut_layout, traced_cut
from shardwise.layout.legality import check_ranks, valid_tp
from shardwise.layout.modules import check_module_layout
from shardwise.model.blueprint import Blueprint
from shardwise.model.parameters import Model

if TYPE_CHECKING:
    from shardwise.model.trace import Trace

RECOMPUTE = ("none", "full")
"""Kinds of recomputation that are traced."""


def traced(model: Blueprint) -> Trace:
    """A module's trace. Raises `UserError` without one."""
    if model.trace is None:
        raise UserError(f"{model.name} was not traced, so nothing is known of its steps: see shardwise.trace")
    return model.trace


def check_row_length(model: Blueprint, workload: Workload) -> None:
    """Raise `UserError` for other sequences than the traced ones."""
    if workload.seq != (seq := traced(model).seq):
        raise UserError(
            f"{model.name} was traced with rows of {seq} elements, not {workload.seq}: choose --seq {seq}, or trace it "
            "with such an example"
        )


def searched_tp(model: Model) -> list[int]:
    """Tensor-parallel degrees of a search: those that suit a configuration, or that were traced in bf16 with and
    without recomputation."""
    if isinstance(model, Blueprint):
        trace = traced(model)
        return sorted({tp for cut in trace.cuts for tp in _whole_degrees(trace, cut)})
    return valid_tp(model)


class SearchedCut(NamedTuple):
    """A cut of a search, as of `traced_cut`."""

    layout: Layout
    sp: list[int]
    """Tensor-parallel degrees beside which sequence parallelism was traced, too."""


def searched_cuts(model: Model) -> dict[str, SearchedCut] | None:
    """Cuts of a search: those of a traced module; None for a configuration, which allows all that divide."""
    if not (trace := model.trace):
        return None
    whole = (cut for cut in trace.cuts if _whole_degrees(trace, cut) == searched_tp(model))
    return {cut: SearchedCut(cut_layout(cut), _whole_degrees(trace.on_shards, cut)) for cut in whole}


def _whole_degrees(trace: Trace, cut: str = "") -> list[int]:
    return [tp for tp in trace.degrees if all(trace.has(tp, "bf16", recompute, cut) for recompute in RECOMPUTE)]


def check_traced(layout: Layout, model: Blueprint, workload: Workload, ranks: int | None = None) -> None:
    """Raise `LayoutError` for a layout whose numbers do not follow from a module's trace, and `UserError` for other
    sequences than those that were traced."""
    trace = traced(model)
    for key, value in changed(layout).items():
        if "untraced" in key.marks:
            known = ", ".join(name for name in SEARCHED if "untraced" not in KEYS[name].marks)
            raise LayoutError(f"{key.text(value)}: a traced module has predictions for {known}; leave {key.name} out")
    check_module_layout(layout)
    check_row_length(model, workload)
    if layout.sp:
        trace = _on_shards(model)
    trace.step(layout.tp, layout.precision, layout.recompute, traced_cut(layout))
    _check_pipeline(layout, model, workload.micro_batches(layout))
    if ranks is not None:
        check_ranks(layout, ranks)


def _on_shards(model: Blueprint) -> Trace:
    trace = traced(model)
    if not trace.on_shards.steps:
        reason = trace.uncut or "trace it again with this release"
        raise LayoutError(f"sp: {model.name} has no predictions for sequence parallelism: {reason}")
    return trace.on_shards


def piped(model: Blueprint) -> bool:
    return traced(model).ends is not None


def check_piped(pp: int, model: Blueprint) -> None:
    """Raise `LayoutError` for a pipeline of a module whose parts are in no known order."""
    if pp > 1 and not piped(model):
        reason = traced(model).unpiped or "trace it again with this release"
        raise LayoutError(f"pp={pp}: {model.name} has no predictions for pipelines: {reason}")


def _check_pipeline(layout: Layout, model: Blueprint, micro_batches: int) -> None:
    check_piped(layout.pp, model)
    if layout.pp == 1:
        if layout.stages:
            pipeline.stages(model, layout)
        return
    where = pipeline.placement(layout)
    if any(one == other for one, other in pairwise(where)):
        raise LayoutError(
            f"schedule={layout.schedule} has neighboring stages on one rank, which a trace says nothing about: choose "
            "schedule=interleaved"
        )
    pipeline.stages(model.piped, layout)
    pipeline.check_schedule(layout, micro_batches)
