"""The views by name, in the order in which the page offers them. Each is imported when it is first asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from shardwise.errors import UserError, did_you_mean
from shardwise.studio.columns import View

VIEWS = {
    "tokens": "Tokens",
    "experts": "Experts",
    "collectives": "Collectives",
    "pipelines": "Pipelines",
    "memory": "Memory",
    "plan": "Plan",
    "sync": "Workers and servers",
    "runs": "Runs",
}
"""Name in the URL -> name on the page."""

WITH_RUNS = ("sync", "runs")
"""Views that read the folder of runs."""

PARTS = {
    "tokens": ("data", "spent"),
    "collectives": ("data", "costs"),
    "pipelines": ("data", "curve"),
    "plan": ("data", "scoreboard"),
}
"""Views whose figures come in several answers, the quick one first: collectives, collectives/costs."""


_MODEL = ("model", "layers", "hidden", "ffn", "heads")
TRAVELS = {
    "tokens": (*_MODEL, "cluster"),
    "experts": ("model",),
    "collectives": ("cluster",),
    "memory": (*_MODEL, "cluster"),
    "plan": (*_MODEL, "cluster"),
}
"""View -> its parameters that carry over from another view if the user chose them there."""


def parts(view: str) -> list[str]:
    return [view if function == "data" else f"{view}/{function}" for function in PARTS.get(view, ("data",))]


def answer(name: str, params: Mapping[str, str], runs: Path = Path("runs")) -> View:
    """Data of a view, or of a part of it, for a state. runs: the folder whose runs are shown. Raises `UserError` for an
    unknown view, and what its function raises."""
    view, _, part = name.partition("/")
    if view not in VIEWS or name not in parts(view):
        raise UserError(f"no view {name!r}; {did_you_mean(view, VIEWS, 'there are')}")
    function: Callable[..., View] = getattr(import_module(f"shardwise.studio.data.{view}"), part or "data")
    return function(params, runs) if view in WITH_RUNS else function(params)
