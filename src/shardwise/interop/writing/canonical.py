"""The plainest layout with one meaning: keys without effect in it have their defaults."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from shardwise.layout import Layout, pipeline
from shardwise.layout.layout import ORDER
from shardwise.model import ModelConfig

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Layout)}
SYNC = (
    "sync", "servers", "staleness", "backup", "damped", "every", "outer", "outer_bits", "moments", "replicas",
)  # fmt: skip
"""Keys of how replicas agree; all but the first need another `sync` than the default."""
SHARDING = ("zero", "shard", "hpz", "qwz", "qgz", "feedback")


def defaults(*keys: str) -> dict[str, Any]:
    """Key -> default of these keys."""
    return {key: DEFAULTS[key] for key in keys}


def canonical(layout: Layout, model: ModelConfig) -> Layout:
    """A layout that splits `model` as `layout` does, with as few keys as can be.

    Without a pipeline its keys go, without a shard group the stage of ZeRO; so do even `stages`, gradients' type beside
    a precision that has one type, and an order of axes that changes no rank's place.
    """
    changes: dict[str, Any] = {}
    if layout.pp == 1:
        changes |= defaults("schedule", "virtual", "stages")
    elif layout.stages and pipeline.stages(model, layout) == pipeline.stages(model, replace(layout, stages=())):
        changes |= defaults("stages")
    if layout.cp == 1:
        changes |= defaults("cpkind")
    if layout.zero and not layout.stage:
        changes |= defaults(*SHARDING)
    if layout.precision != "bf16":
        changes |= defaults("grads")
    if _ordered(layout, layout.order) == _ordered(layout, ORDER):
        changes |= defaults("order")
    return replace(layout, **changes)


def _ordered(layout: Layout, order: str) -> list[str]:
    """Axes with more than one rank, slowest first."""
    return [axis for axis in order.split("-") if getattr(layout, axis) > 1]
