"""Layouts for generation: which are legal, the plan of a rank, and its sequences."""

from dataclasses import replace
from functools import lru_cache

from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, check, unit_plan
from shardwise.layout.axes import CP, EP, ETP, SHARD, STAGE, TP, Axes
from shardwise.layout.experts import experts_across
from shardwise.layout.keys import changed
from shardwise.model import ModelConfig


def check_generation(layout: Layout, model: ModelConfig, devices: int | None = None) -> None:
    """Raise `LayoutError` when a model cannot be generated with under a layout, or on so many devices; `UserError` when
    no decoder here computes it, unless it is counted from its tensors' shapes."""
    if not model.counted:
        check_runs(model)
    check(layout, model.replace(attention_dropout=0.0))  # nothing is dropped when generating
    for key, value in changed(layout).items():
        if "training" in key.marks:
            raise LayoutError(f"{key.text(value)} {key.training}")
    if layout.cp > 1 and layout.stage == 3:
        raise LayoutError(f"weights are gathered without cp={layout.cp}: use zero=0 with cp, or leave cp out")
    if layout.zero in (1, 2):
        raise LayoutError(f"zero={layout.zero} shards what only training has: use zero=0 (replicas) or zero=3")
    if layout.pp > 1 and layout.stage == 3:
        gathering = replace(layout, pp=1, dp=layout.dp * layout.pp, shard=0)
        staged = replace(layout, zero=0, shard=0)
        raise LayoutError(f"weights are gathered without a pipeline, with pp=1: use {gathering} or {staged}")
    if model.experts:
        _check_experts(layout)
    if devices is not None and layout.ranks > devices:
        raise LayoutError(f"layout {layout} needs {layout.ranks} ranks, but there are {devices} devices")


def check_runs(model: ModelConfig) -> None:
    """Raise `UserError` when no decoder here computes a model."""
    if reason := model.why_not_runnable():
        raise UserError(f"{model.name}: {reason}")


def _check_experts(layout: Layout) -> None:
    """Raise `LayoutError` where generation does not find a way from all tokens to their experts."""
    if layout.stage == 3 and layout.shard:
        raise LayoutError(f"shard={layout.shard} leaves experts gathered over all data ranks: leave shard out")
    if layout.ep == 1:
        return
    if layout.stage == 3:
        raise LayoutError(
            f"ep={layout.ep} keeps experts where they are, and zero=3 gathers them: leave out one of them"
        )
    if [axis for axis in layout.order.split("-") if axis in STAGE] != list(STAGE):
        raise LayoutError(f"order={layout.order} is for training: generation with ep={layout.ep} has the usual order")
    if layout.expert_tp == 1 and layout.ep % layout.tp and layout.tp % layout.ep:
        raise LayoutError(
            f"ep={layout.ep} cuts through the tensor-parallel ranks: in generation it divides tp={layout.tp}, or is a "
            "multiple of it"
        )
    if layout.cp % experts_across(layout) and layout.cp > 1:
        raise LayoutError(
            f"ep={layout.ep} spreads experts over replicas, whose steps cp={layout.cp} cuts: choose an ep of at most "
            f"{layout.cp if layout.expert_tp > 1 else layout.cp * layout.tp}, or leave cp out"
        )


def replicas_in_step(layout: Layout) -> int:
    """Replicas that compute every engine step together: ranks that gather each other's weights, or that have experts
    for each other's tokens."""
    if layout.stage == 3:
        return layout.shard_ranks
    return experts_across(layout) if layout.cp == 1 else 1


def lockstep_axes(layout: Layout) -> Axes:
    """The ranks of one pipeline stage that compute every engine step together."""
    if layout.stage == 3:
        return SHARD + TP
    return EP + ETP if replicas_in_step(layout) > 1 else CP + TP


def rows_here(layout: Layout, tokens: int) -> int:
    """Rows of an engine step of so many tokens on each rank: cut over cp, padded to equal parts."""
    return -(-tokens // layout.cp)


def check_length(model: ModelConfig, prompt: int, output: int) -> None:
    """Raise `UserError` when a prompt and an answer of so many tokens exceed the model's positions."""
    if prompt + output > model.max_positions:
        raise UserError(
            f"{model.name} knows {model.max_positions} positions: a prompt of {prompt} tokens and {output} more are "
            "too many"
        )


@lru_cache(maxsize=64)
def plan_of(model: ModelConfig, layout: Layout, stage: int = 0, tp: int = 0) -> UnitPlan:
    """The plan of a rank of a stage, for a workload without a training step."""
    return unit_plan(model, layout, Workload(), rank=Mesh.of(layout, model).rank(pp=stage, dp=0, cp=0, tp=tp))


def sequences_of(layout: Layout, sequences: int) -> int:
    """Sequences on the busiest data rank: replicas, and ranks that gather weights, share them out evenly.

    One alone under weight gathering is computed by all ranks alike, which gather for it either way.
    """
    return -(-sequences // layout.dp)
