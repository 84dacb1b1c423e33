"""Figures that people quote about splitting models, each computed here with public functions of shardwise.

`show` computes one claim of `shardwise.validation.claims`; `docs/claims.py` writes `docs/claims.md` from them.
"""

from quoted import activations, collectives, compute, pipelines, serving, states
from quoted.showing import Samples, Shown, computed_by, missing, show, topics

__all__ = [
    "Samples",
    "Shown",
    "activations",
    "collectives",
    "compute",
    "computed_by",
    "missing",
    "pipelines",
    "serving",
    "show",
    "states",
    "topics",
]
