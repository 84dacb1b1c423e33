"""Layouts with state off the device: points of all spaces, each with one of the ways to offload."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.contexts import context_cases
from harness.experts import expert_cases, settled
from harness.pipelines import pipeline_cases
from harness.reference import Case
from harness.space import GENERATOR_SEED, Point, all_cases
from harness.today import EVERY_LAYOUT, seed
from shardwise.layout import Layout

WAYS = (
    "offload=cpu",
    "offload=nvme",
    "offload=cpu:0.4",
    "offload=nvme:0.6",
    "offload=cpu,offload_params=cpu",
    "offload=nvme,offload_params=nvme",
    "offload=cpu:0.3,offload_params=nvme",
    "offload=nvme,offload_params=cpu",
    "offload_activations=cpu",
    "offload=nvme,offload_params=nvme,offload_activations=cpu",
)
SPACES = {"dense": all_cases, "pipelines": pipeline_cases, "contexts": context_cases, "experts": expert_cases}
OF_EACH = 2
TODAY = 3


@dataclass(frozen=True)
class Offloaded:
    """A case under a layout in memory, and the same one with state off the device."""

    id: str
    case: Case
    plain: Layout
    layout: Layout


def _cases() -> Iterator[Offloaded]:
    generator = random.Random(GENERATOR_SEED)
    for name, points in SPACES.items():
        for way in WAYS:
            legal = [p for p in points() if p.layout.ranks < 8 and (p.layout.stage == 3 or "params" not in way)]
            for point in generator.sample(legal, OF_EACH):
                yield _offloaded(name, point, way)


def _offloaded(name: str, point: Point, way: str) -> Offloaded:
    layout = replace(point.layout, **dict(word.split("=") for word in way.split(",")))
    return Offloaded(f"{name}:{point.id}:{way}", point.case, point.layout, layout)


def offload_cases() -> list[Offloaded]:
    """At least forty cases."""
    return list(_cases())


def selected_offloads() -> list[Offloaded]:
    """All of them, or today's."""
    every = offload_cases()
    return every if EVERY_LAYOUT else random.Random(seed()).sample(every, TODAY)


def clear(offloaded: Offloaded) -> Case:
    """Its case, with experts whose choice rounding does not change."""
    return settled(offloaded.case) if offloaded.case.model.experts else offloaded.case
