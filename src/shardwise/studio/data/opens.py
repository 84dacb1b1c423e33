"""Links from one view to the others that carry the model, the cluster and a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any
from urllib.parse import urlencode

from shardwise.layout import Layout
from shardwise.model.catalog import resolve
from shardwise.studio.data.sizes import SIZES

_MEMORY = (
    "dp", "tp", "pp", "cp", "zero", "sp", "schedule", "virtual", "micro", "recompute", "attention", "offload",
    "offload_params", "offload_activations",
    "precision", "grads",
)  # fmt: skip
"""Keys of a layout that the Memory view has."""
_PLAN = ("dp", "tp", "pp", "cp", "zero")
_USUAL = Layout()
_MOST_RANKS = 64
"""Ranks of a pipeline that the Pipelines view draws."""


def opens(state: Mapping[str, Any], layout: Layout, here: str, micro_batches: int = 0) -> list[tuple[str, str]]:
    """(title, address) of the views other than `here` that can show the layout. state: of the view that has the link;
    micro_batches: of a step, 0 where the view has none."""
    base = resolve(str(state["model"]), fetch=False)
    shared = {"model": state["model"]} | {n: state[n] for n in SIZES if state[n] != getattr(base, n)}
    shared["cluster"] = state["cluster"]
    training = {name: state[name] for name in ("seq", "batch") if name in state and here != "tokens"}
    changed = {field.name for field in fields(Layout) if getattr(layout, field.name) != getattr(_USUAL, field.name)}
    links = []
    if here != "memory" and changed <= {*_MEMORY, "compile"}:
        words = {name: getattr(layout, name) for name in _MEMORY if name in changed or name == "dp"}
        words |= {"sp": int(layout.sp)} if "sp" in words else {}
        links.append(("Memory", "memory", shared | training | words))
    if 1 < layout.pp <= _MOST_RANKS:
        drawn = {"a": layout.schedule, "ranks": layout.pp, "micro": micro_batches or 2 * layout.pp}
        links.append(("Pipelines", "pipelines", drawn | ({"virtual": layout.virtual} if layout.virtual > 1 else {})))
    if here != "plan":
        fix = ",".join(f"{name}={getattr(layout, name)}" for name in _PLAN)
        links.append(("Plan", "plan", shared | training | {"fix": fix}))
    return [(title, f"{view}?{urlencode(words)}") for title, view, words in links]
