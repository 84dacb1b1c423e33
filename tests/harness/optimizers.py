"""Cases of every space trained by SGD, with momentum and without."""

import random
from collections.abc import Iterator
from dataclasses import replace

from harness.offloads import SPACES, WAYS, Offloaded, clear
from harness.reference import Case
from harness.space import GENERATOR_SEED, Point
from harness.today import by_turns
from shardwise.layout import Layout
from shardwise.layout.optimizers import DEFAULT, OPTIMIZERS
from shardwise.runtime.job.config import OptimizerConfig

KINDS = tuple(kind for kind in OPTIMIZERS if kind != DEFAULT)
STEPS = 5
OF_EACH = {"dense": 6, "pipelines": 3, "contexts": 2, "experts": 2}
"""Points of each space, for each optimizer."""
TODAY = 4
CONFIG = OptimizerConfig(lr=0.05, warmup=2, clip=0.5)


def trained_by(kind: str, case: Case) -> Case:
    """The case with this optimizer."""
    return replace(case, workload=replace(case.workload, optimizer=kind), optimizer=CONFIG, steps=STEPS)


def _optimized(kind: str, name: str, point: Point, way: str) -> Offloaded:
    homes = dict(word.split("=") for word in way.split(",")) if way else {}
    case = trained_by(kind, point.case)
    return Offloaded(f"{kind}:{name}:{point.id}:{way}", case, point.layout, replace(point.layout, **homes))


def _cases() -> Iterator[Offloaded]:
    generator = random.Random(GENERATOR_SEED)
    for kind in KINDS:
        for name, points in SPACES.items():
            exact = [p for p in points() if p.layout.ranks < 8 and p.case.precision == "fp64"]
            for point in generator.sample(exact, OF_EACH[name]):
                yield _optimized(kind, name, point, "")
        for way in WAYS:
            name = generator.choice(list(SPACES))
            legal = [
                p for p in SPACES[name]()
                if p.layout.ranks < 8 and p.case.precision == "fp64" and (p.layout.stage == 3 or "params" not in way)
            ]  # fmt: skip
            yield _optimized(kind, name, generator.choice(legal), way)


def optimizer_cases() -> list[Offloaded]:
    """Both optimizers in every space, and with every way to offload."""
    return list(_cases())


def selected_optimizers() -> list[Offloaded]:
    """All of them, or today's."""
    return by_turns(optimizer_cases(), TODAY, "optimizers")


def settled_case(optimized: Offloaded) -> Case:
    """Its case, with experts whose choice rounding does not change."""
    return clear(optimized)


def small(text: str, kind: str, **choices: object) -> tuple[Case, Layout]:
    """A small case under a layout."""
    from harness.space import point

    layout = Layout.parse(text)
    chosen = {"model": "llama", "dp": layout.dp, "accumulate": 2, "precision": layout.precision} | choices
    return trained_by(kind, point(**chosen).case), layout
