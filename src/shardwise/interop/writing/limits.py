"""`Limit`: one thing that an engine cannot express, and the nearest that it can."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import LayoutError
from shardwise.interop.expressions import Names, evaluate
from shardwise.interop.writing.canonical import DEFAULTS, SYNC, defaults
from shardwise.layout import Layout
from shardwise.layout.keys import KEYS, goes_with
from shardwise.model import ModelConfig

_DEGREES = ("tp", "pp", "cp")
"""Axes whose ranks become data-parallel ones without them."""
_HOMES = tuple(name for name, key in KEYS.items() if "nvme" in key.choices)
_WITH = {key: goes_with(key) for key in KEYS if goes_with(key)}
_WITH |= {"virtual": ("schedule", "stages"), "zero": (*_WITH["zero"], *_HOMES)}
"""Key -> keys that cannot stay when it gets its default."""


@dataclass(frozen=True)
class Limit:
    """A bound on the layouts that an engine expresses. Without `set`, the key gets its default."""

    key: str
    """The layout key that messages name."""
    why: str
    when: str = "True"
    """Expression of a layout that is outside."""
    set: str = ""
    """Arguments of the layout that is nearest, such as zero=3."""
    plain: str = ""
    """Keys that get their defaults there, first; with * the keys that depend on one, too."""
    experts: bool = False
    """Whether it bounds models with experts alone."""

    def broken(self, layout: Layout) -> bool:
        """Whether a layout is outside."""
        if not self.set and getattr(layout, self.key) == DEFAULTS[self.key]:
            return False
        return bool(evaluate(self.when, Names(layout)))

    def repair(self, layout: Layout) -> dict[str, Any]:
        """Key -> value of the nearest layout within the bound."""
        keys = [self.key] if not self.set else []
        for key in self.plain.split():
            keys += [key.rstrip("*"), *(_WITH[key.rstrip("*")] if key.endswith("*") else ())]
        changes = defaults(*keys)
        if self.set:
            return changes | evaluate(f"dict({self.set})", Names(layout))
        if self.key in _DEGREES:
            changes["dp"] = layout.dp * getattr(layout, self.key)
        return changes


def absent(expressed: Iterable[str], left: Iterable[str]) -> list[Limit]:
    """Limits for every key that an engine has no word for. left: keys that its files may leave to the user's code."""
    known = {*expressed, *left}
    keys = [key for key in DEFAULTS if key not in known and (key not in SYNC or key == "sync")]
    return [Limit(key, "it has no word for it", plain=f"{key}*" if key in _WITH else "") for key in keys]


def first_broken(limits: Iterable[Limit], layout: Layout, model: ModelConfig) -> Limit | None:
    """The first limit that a layout of a model breaks; None when it keeps all."""
    bounds = (limit for limit in limits if model.experts or not limit.experts)
    return next((limit for limit in bounds if limit.broken(layout)), None)


def nearest(limits: Collection[Limit], layout: Layout, model: ModelConfig) -> Layout | None:
    """The layout with every broken limit repaired; None where the repairs contradict each other."""
    for _ in range(2 * len(limits) + 1):
        limit = first_broken(limits, layout, model)
        if limit is None:
            return layout
        try:
            layout = replace(layout, **limit.repair(layout))
        except LayoutError:
            return None
    return None
