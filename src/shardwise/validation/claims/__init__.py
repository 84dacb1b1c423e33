"""Figures that people quote about splitting models, each computed here by a public function of shardwise.

`claims()` is the table, `show` one computed figure; `docs/claims.md` is made from them.
"""

from shardwise.validation.claims import activations, collectives, compute, pipelines, serving, states
from shardwise.validation.claims.showing import Samples, Shown, computed_by, missing, show, topics
from shardwise.validation.claims.table import Claim, claims

__all__ = [
    "Claim",
    "Samples",
    "Shown",
    "activations",
    "claims",
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
