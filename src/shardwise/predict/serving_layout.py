"""Layouts for generation: which are legal, the plan of a rank, and its sequences."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, check, unit_plan
from shardwise.layout.axes import CP, SHARD, TP, Axes
from shardwise.layout.legality import unsupported
from shardwise.model import ModelConfig


def check_generation(layout: Layout, model: ModelConfig, devices: int | None = None) -> None:
    """Raise `LayoutError` when a model cannot be generated with under a layout, or on so many devices; `UserError` when
    no decoder here computes it."""
    if reason := model.why_not_runnable():
        raise UserError(f"{model.name}: {reason}")
    check(layout, model.replace(attention_dropout=0.0))  # nothing is dropped when generating
    if words := unsupported(layout):
        raise LayoutError(f"generation does not support {', '.join(words)}: it has tp, cp, pp, dp and zero=3")
    if layout.cpkind != "ring":
        raise LayoutError(f"cpkind={layout.cpkind} is for training: leave it out, generation cuts the cache's pages")
    if layout.cp > 1 and layout.stage == 3:
        raise LayoutError(f"weights are gathered without cp={layout.cp}: use zero=0 with cp, or leave cp out")
    if layout.algorithm != "auto":
        raise LayoutError(f"algorithm={layout.algorithm} is for training: leave it out")
    if layout.zero in (1, 2):
        raise LayoutError(f"zero={layout.zero} shards what only training has: use zero=0 (replicas) or zero=3")
    if layout.sp:
        raise LayoutError("sp cuts sequences, of which a turn has one token each: leave sp out")
    if layout.inner_ranks != layout.tp:
        raise LayoutError("tpkind=gathered is for training: leave it out, and tp gathers nothing but logits")
    if layout.virtual > 1:
        raise LayoutError(f"virtual={layout.virtual} is for training: generation has one chunk of layers a stage")
    if layout.pp > 1 and layout.stage == 3:
        gathering = replace(layout, pp=1, dp=layout.dp * layout.pp, shard=0)
        staged = replace(layout, zero=0, shard=0)
        raise LayoutError(f"weights are gathered without a pipeline, with pp=1: use {gathering} or {staged}")
    if devices is not None and layout.ranks > devices:
        raise LayoutError(f"layout {layout} needs {layout.ranks} ranks, but there are {devices} devices")


def lockstep_axes(layout: Layout) -> Axes:
    """The ranks of one pipeline stage that compute every engine step together."""
    return SHARD + TP if layout.stage == 3 else CP + TP


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


def blocks_of(plan: UnitPlan) -> list[str]:
    """The blocks that a rank computes, in order."""
    return plan.of_kind("block")


def sequences_of(layout: Layout, sequences: int) -> int:
    """Sequences on the busiest data rank: replicas, and ranks that gather weights, share them out evenly.

    One alone under weight gathering is computed by all ranks alike, which gather for it either way.
    """
    return -(-sequences // layout.dp)
