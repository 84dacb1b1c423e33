"""The views by name, in the order in which the page offers them. Each is imported when it is first asked for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

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


def _powers(least: int, most: int) -> list[int]:
    return [1 << power for power in range(least, most + 1)]


_TIMES = (0, 0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100)
_MICRO = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
OFFERED: dict[str, dict[str, Sequence[Any]]] = {
    "tokens": {"batch": _powers(0, 8)},
    "collectives": {"ranks": range(1, 17), "root": range(16), "bytes": _powers(8, 34)}
    | dict.fromkeys(("segments", "node"), range(1, 16)),
    "pipelines": {"ranks": range(1, 17), "virtual": range(1, 9), "micro": _MICRO}
    | dict.fromkeys(("F", "I", "W", "hop"), _TIMES),
    "memory": {"tp": _powers(0, 4), "zero": range(4), "sp": range(2), "micro": _powers(0, 5), "virtual": _powers(0, 3)}
    | dict.fromkeys(("pp", "cp"), _powers(0, 5))
    | dict.fromkeys(("dp", "batch"), _powers(0, 10)),
    "plan": {"batch": _powers(3, 12)},
    "sync": {
        "workers": range(1, 17),
        "steps": range(1, 101),
        "every": range(1, 17),
        "factor": (1, 1.2, 1.5, 2, 3, 4, 5, 8, 10, 20),
        "probability": [percent / 100 for percent in range(5, 101, 5)],
        "gradient": (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
    }
    | dict.fromkeys(("staleness", "backup"), range(9)),
}
"""View -> values that its controls offer in every state, in addition to the choices that follow the state."""


def parts(view: str) -> list[str]:
    return [view if function == "data" else f"{view}/{function}" for function in PARTS.get(view, ("data",))]


def answer(name: str, params: Mapping[str, str], runs: Path = Path("runs")) -> View:
    """Data of a view, or of a part of it, for a state. runs: the folder whose runs are shown. Raises `UserError` for an
    unknown view, and what its function raises."""
    view, _, part = name.partition("/")
    if view not in VIEWS or name not in parts(view):
        raise UserError(f"no view {name!r}; {did_you_mean(view, VIEWS, 'there are')}")
    function: Callable[..., View] = getattr(import_module(f"shardwise.studio.data.{view}"), part or "data")
    result = function(params, runs) if view in WITH_RUNS else function(params)
    offered = {name: list(values) for name, values in OFFERED.get(view, {}).items()}
    return replace(result, choices={**offered, **result.choices})
