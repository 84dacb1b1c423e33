"""Cases of every space trained by SGD, with momentum and without."""

import random
from collections.abc import Iterator
from dataclasses import replace

from harness.offloads import WAYS, Offloaded, legal, offloaded
from harness.reference import Case
from harness.space import GENERATOR_SEED, SPACES, point
from shardwise.layout import Layout
from shardwise.layout.optimizers import DEFAULT, OPTIMIZERS
from shardwise.runtime.job.config import OptimizerConfig

KINDS = tuple(kind for kind in OPTIMIZERS if kind != DEFAULT)
STEPS = 5
OF_EACH = {"dense": 6, "pipelines": 3, "contexts": 2, "experts": 2}
"""Points of each space, for each optimizer."""
CONFIG = OptimizerConfig(lr=0.05, warmup=2, clip=0.5)


def trained_by(kind: str, case: Case) -> Case:
    return replace(case, workload=replace(case.workload, optimizer=kind), optimizer=CONFIG, steps=STEPS)


def optimizer_cases() -> Iterator[Offloaded]:
    """Both optimizers in every space, and with every way to offload."""
    generator = random.Random(GENERATOR_SEED)

    def drawn(kind: str, name: str, way: str, count: int) -> Iterator[Offloaded]:
        exact = [p for p in legal(name, way) if p.case.precision == "fp64"]
        for each in generator.sample(exact, count):
            yield offloaded(f"{kind}:{name}", each, way, trained_by(kind, each.case))

    for kind in KINDS:
        for name in SPACES:
            yield from drawn(kind, name, "", OF_EACH[name])
        for way in WAYS:
            yield from drawn(kind, generator.choice(list(SPACES)), way, 1)


def small(text: str, kind: str, **choices: object) -> tuple[Case, Layout]:
    layout = Layout.parse(text)
    chosen = {"model": "llama", "dp": layout.dp, "accumulate": 2, "precision": layout.precision} | choices
    return trained_by(kind, point(**chosen).case), layout
