"""Overlaps as a dimension of the search: variants of an engine profile with some overlaps switched off.

A plan for one engine uses its profile as it is. To learn what overlapping is worth, the search covers all
combinations, each once: a switch that changes nothing stays on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

from shardwise.planner.space import LayoutColumns, ZeroChoice
from shardwise.predict.time.profiles import EngineProfile

SWITCHES = ("tensor_overlap", "grad_overlap", "gather_overlap", "pipeline_overlap")
"""Fields of an engine: what runs beside computation."""


@lru_cache
def variants(engine: EngineProfile) -> tuple[EngineProfile, ...]:
    """The engine with every combination of the switches, all on first."""
    return tuple(
        replace(engine, **dict[str, Any](zip(SWITCHES, chosen, strict=True)))
        for chosen in product((True, False), repeat=len(SWITCHES))
    )


def distinct(frame: LayoutColumns, engine: EngineProfile) -> Iterator[tuple[EngineProfile, tuple[ZeroChoice, ...]]]:
    """The variants that differ on this mesh, each with the shardings for which it does."""
    for variant in variants(engine):
        idle = (
            (not variant.tensor_overlap and frame.tp == 1)
            or (not variant.grad_overlap and frame.data == 1)
            or (not variant.pipeline_overlap and frame.pp == 1)
        )
        shardings = tuple(s for s in frame.shardings if variant.gather_overlap or s.zero)
        if shardings and not idle:
            yield variant, shardings


def words(variant: EngineProfile) -> str:
    """Overlaps of a variant, such as "tensor+grad+gather"."""
    on = [name.removesuffix("_overlap") for name in SWITCHES if getattr(variant, name)]
    return "+".join(on) or "nothing"
