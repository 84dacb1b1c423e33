"""Layouts with state off the device: points of all spaces, each with one of the ways to offload."""

import random
from dataclasses import dataclass, replace

from harness.cases import table
from harness.experts import settled
from harness.reference import Case
from harness.space import GENERATOR_SEED, SPACES, Point, cases
from shardwise.layout import Layout

WAYS = table(__file__, "WAYS")
OF_EACH = 2


@dataclass(frozen=True)
class Offloaded:
    """A case under a layout in memory, and the same one with state off the device."""

    id: str
    case: Case
    plain: Layout
    layout: Layout


def legal(name: str, way: str) -> list[Point]:
    return [p for p in cases(name) if p.layout.ranks < 8 and (p.layout.stage == 3 or "params" not in way)]


def offloaded(name: str, point: Point, way: str, case: Case | None = None) -> Offloaded:
    layout = replace(point.layout, **dict(word.split("=") for word in way.split(",") if word))
    return Offloaded(f"{name}:{point.id}:{way}", case or point.case, point.layout, layout)


def offload_cases() -> list[Offloaded]:
    generator = random.Random(GENERATOR_SEED)
    return [
        offloaded(name, point, way)
        for name in SPACES
        for way in WAYS
        for point in generator.sample(legal(name, way), OF_EACH)
    ]


def clear(offloaded: Offloaded) -> Case:
    """Its case, with experts whose choice rounding does not change."""
    return settled(offloaded.case) if offloaded.case.model.experts else offloaded.case
