"""The plainest layout with one meaning: keys without effect in it have their defaults."""

from dataclasses import replace
from typing import Any

from shardwise.layout import Layout, pipeline
from shardwise.layout.keys import KEYS, ORDER, defaults, goes_with
from shardwise.model.parameters import Model

DEFAULTS: dict[str, Any] = defaults(*KEYS)
SYNC = ("sync", *goes_with("sync"))
"""Keys of how replicas agree; all but the first need another `sync` than the default."""
SHARDING = ("zero", *goes_with("zero"))


def canonical(layout: Layout, model: Model) -> Layout:
    """A layout that splits `model` as `layout` does, with as few keys as can be.

    Keys that mean nothing in it go; so do even `stages`, and an order of axes that changes no rank's place.
    """
    changes = defaults(*(key.name for key in KEYS.values() if not key.matters(layout)))
    if layout.pp > 1 and layout.stages:
        even = pipeline.stages(model, replace(layout, stages=()))
        changes |= defaults("stages") if pipeline.stages(model, layout) == even else {}
    if _ordered(layout, layout.order) == _ordered(layout, ORDER):
        changes |= defaults("order")
    return replace(layout, **changes)


def _ordered(layout: Layout, order: str) -> list[str]:
    """Axes with more than one rank, slowest first."""
    return [axis for axis in order.split("-") if getattr(layout, axis) > 1]
