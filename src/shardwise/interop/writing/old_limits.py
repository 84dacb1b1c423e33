"""`Limit`: one thing that an engine cannot express, and the nearest that it can."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import LayoutError
from shardwise.interop.writing.canonical import DEFAULTS, SHARDING, SYNC, defaults
from shardwise.layout import Layout
from shardwise.model import ModelConfig

Changes = dict[str, Any]


@dataclass(frozen=True)
class Limit:
    """A bound on the layouts that an engine expresses."""

    key: str
    """The layout key that messages name."""
    broken: Callable[[Layout], bool]
    repair: Callable[[Layout], Changes]
    """Key -> value of the nearest layout within the bound."""
    why: str
    experts: bool = False
    """Whether it bounds models with experts alone."""


def only(key: str, values: Collection[Any], nearest: Any, why: str) -> Limit:
    """A key with few values. nearest: the one in place of all others."""
    return Limit(key, lambda layout: getattr(layout, key) not in values, lambda _: {key: nearest}, why)


def without(key: str, when: Callable[[Layout], bool], why: str, *more: str) -> Limit:
    """A key that must have its default where `when` holds. more: keys that then have theirs, too."""
    return Limit(
        key,
        lambda layout: getattr(layout, key) != DEFAULTS[key] and when(layout),
        lambda _: defaults(key, *more),
        why,
    )


def as_data(key: str, when: Callable[[Layout], bool], why: str, *more: str) -> Limit:
    """A degree that must be 1 where `when` holds; its ranks become data-parallel ones."""

    def repair(layout: Layout) -> Changes:
        return defaults(key, *more) | {"dp": layout.dp * getattr(layout, key)}

    return Limit(key, lambda layout: getattr(layout, key) > 1 and when(layout), repair, why)


def always(_: Layout) -> bool:
    """The condition of a limit without one."""
    return True


_WITH: dict[str, tuple[str, ...]] = {
    "pp": ("schedule", "virtual", "stages"),
    "virtual": ("schedule", "stages"),
    "tp": ("sp", "etp", "tpkind"),
    "cp": ("cpkind",),
    "ep": ("etp",),
    "zero": (*SHARDING, "offload", "offload_params"),
    "sync": SYNC,
}
"""Key -> keys that cannot stay when it gets its default."""


def absent(expressed: Iterable[str], left: Iterable[str]) -> list[Limit]:
    """Limits for every key that an engine has no word for. left: keys that its files may leave to the user's code."""
    known = {*expressed, *left}
    limits = []
    for key in DEFAULTS:
        if key in known or (key in SYNC and key != "sync"):
            continue
        make = as_data if key in ("tp", "pp", "cp") else without
        limits.append(make(key, always, "it has no word for it", *_WITH.get(key, ())))
    return limits


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
