"""Links from one view to the others that carry the model, the cluster and a layout."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from shardwise.layout import Layout
from shardwise.layout.keys import changed
from shardwise.model.catalog import resolve
from shardwise.studio.data.sizes import SIZES

WORDS = ("schedule", "recompute", "offload", "offload_params", "offload_activations", "precision", "grads", "attention")
"""Keys of the Memory view that are one of a few words."""
NUMBERS = {"zero": 3, "micro": 1 << 16, "virtual": 64}
"""Keys of the Memory view that are numbers -> the largest."""
MEMORY = ("dp", "tp", "pp", "cp", *NUMBERS, "sp", *WORDS)
"""Keys of a layout that the Memory view has."""
_PLAN = ("dp", "tp", "pp", "cp", "zero")
_MOST_RANKS = 64
"""Ranks of a pipeline that the Pipelines view draws."""


def opens(state: Mapping[str, Any], layout: Layout, here: str, micro_batches: int = 0) -> list[tuple[str, str]]:
    """(title, address) of the views other than `here` that can show the layout. state: of the view that has the link;
    micro_batches: of a step, 0 where the view has none."""
    base = resolve(str(state["model"]), fetch=False)
    shared = {"model": state["model"]} | {n: state[n] for n in SIZES if state[n] != getattr(base, n)}
    shared["cluster"] = state["cluster"]
    training = {name: state[name] for name in ("seq", "batch") if name in state and here != "tokens"}
    different = {key.name for key in changed(layout)}
    links = []
    if here != "memory" and different <= {*MEMORY, "compile"}:
        words = {name: getattr(layout, name) for name in MEMORY if name in different or name == "dp"}
        words |= {"sp": int(layout.sp)} if "sp" in words else {}
        links.append(("Memory", "memory", shared | training | words))
    if 1 < layout.pp <= _MOST_RANKS:
        drawn = {"a": layout.schedule, "ranks": layout.pp, "micro": micro_batches or 2 * layout.pp}
        links.append(("Pipelines", "pipelines", drawn | ({"virtual": layout.virtual} if layout.virtual > 1 else {})))
    if here != "plan":
        fix = ",".join(f"{name}={getattr(layout, name)}" for name in _PLAN)
        links.append(("Plan", "plan", shared | training | {"fix": fix}))
    return [(title, f"{view}?{urlencode(words)}") for title, view, words in links]
