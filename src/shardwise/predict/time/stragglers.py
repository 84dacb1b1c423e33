"""The time of a step with slow ranks: who waits for whom under each way in which replicas agree.

Factors of ranks and steps are what a run with the same seed draws (`schedule.stragglers`). Inside a replica,
or a worker of parameter servers, a step takes as long as its slowest rank's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import REPLICA
from shardwise.model.parameters import Model
from shardwise.report.units import format_share, format_time
from shardwise.schedule.staleness import ByStep, simulate
from shardwise.schedule.stragglers import Stragglers

if TYPE_CHECKING:
    from numpy.typing import NDArray

ARITHMETIC = ("matmul", "attention", "memory")
"""Parts of a step that a slow rank's factor applies to: the arithmetic of its forward and backward passes."""
EMULATED = (*ARITHMETIC, "host")
"""Parts in whose place a run with `--emulate` lets time pass."""
STEPS, LEAST_STEPS = 1000, 20
"""Steps whose mean is predicted, and the fewest of them."""
MOST_DRAWS, MOST_MEETINGS = 1_000_000, 20_000_000
"""Factors that are drawn, and encounters of two workers in virtual time: many ranks make fewer steps."""


@dataclass(frozen=True)
class StraggledStep:
    """The mean step of a run with slow ranks."""

    seconds: float
    alone: float
    """Seconds of a step without slow ranks."""
    why: str
    """What the step waits for, in words."""

    @property
    def note(self) -> str:
        """One sentence for a prediction."""
        more = format_share(self.seconds / self.alone - 1, signed=True)
        return f"slow ranks: a step takes {format_time(self.seconds)}, {more} over one without them: {self.why}"


def with_stragglers(
    parts: dict[str, float], model: Model, layout: Layout, slow: Stragglers | None, emulated: float | None = None
) -> tuple[dict[str, float], str]:
    """Parts of a step with slow ranks, and a sentence about it ("" where no rank is slow). parts: of a step without.
    emulated: seconds that the arithmetic of a step lasts in place of the predicted."""
    if emulated is not None:
        parts = {name: seconds for name, seconds in parts.items() if name not in EMULATED} | {"emulated": emulated}
    if slow is None or not slow.slow:
        return parts, ""
    arithmetic = sum(parts.get(name, 0.0) for name in (*ARITHMETIC, "emulated"))
    step = straggled_step(model, layout, slow, arithmetic, sum(parts.values()) - arithmetic)
    return parts | {"stragglers": step.seconds - step.alone}, step.note


def straggled_step(
    model: Model, layout: Layout, slow: Stragglers, arithmetic: float, rest: float, steps: int | None = None
) -> StraggledStep:
    """The mean step. arithmetic: seconds of a step that a rank's factor multiplies; rest: the others, such
    as the exchange of gradients. steps: of the run, from its first one; None: enough for a mean."""
    steps = steps or _enough(layout)
    if layout.local_sgd:
        seconds, why = _rounds(_replicas(model, layout, slow, -(-steps // layout.every) * layout.every), layout.every)
        seconds = seconds * arithmetic + rest
    elif layout.asynchronous:
        shares = min(steps * layout.dp, MOST_DRAWS // layout.training_ranks)
        seconds, why = _rates(_replicas(model, layout, slow, shares) * arithmetic + rest)
    elif layout.served and (layout.staleness or layout.backup):
        seconds, why = _bounded(_replicas(model, layout, slow, steps) * arithmetic + rest, layout)
    else:
        factors = slow.factors(range(layout.training_ranks), np.arange(steps)).max(axis=0)
        seconds, why = factors.mean() * arithmetic + rest, f"it waits for the slowest of {layout.training_ranks} ranks"
    return StraggledStep(float(seconds), arithmetic + rest, why)


def _enough(layout: Layout) -> int:
    """Steps for a mean; many ranks make fewer."""
    most = MOST_DRAWS // layout.training_ranks
    if layout.staleness or layout.backup:
        most = min(most, MOST_MEETINGS // layout.independent**2)
    return max(LEAST_STEPS, min(STEPS, most))


def _replicas(model: Model, layout: Layout, slow: Stragglers, steps: int) -> NDArray[np.float64]:
    """Factors [replicas, steps]: of the slowest rank of each replica, or worker."""
    mesh, ranks = Mesh.of(layout, model), range(layout.training_ranks)
    factors = slow.factors(ranks, np.arange(steps))
    slowest = np.zeros((layout.independent, steps))
    np.maximum.at(slowest, [mesh.index(REPLICA, rank) for rank in ranks], factors)
    return slowest


def _rounds(factors: NDArray[np.float64], every: int) -> tuple[float, str]:
    """Mean factor of a step, over rounds of `every` steps, in which the slowest replica decides. factors: [replicas,
    steps]."""
    sums = factors.reshape(len(factors), -1, every).sum(axis=2)
    why = f"it waits once in {every} steps for the slowest of {len(factors)} replicas"
    return float(sums.max(axis=0).mean()) / every, why


def _rates(seconds: NDArray[np.float64]) -> tuple[float, str]:
    """Seconds of a step, which is as many shares of the text as there are workers: their rates add up. seconds:
    [workers, shares]."""
    workers = len(seconds)
    return workers / float((1 / seconds.mean(axis=1)).sum()), f"none of {workers} workers waits for another"


def _bounded(seconds: NDArray[np.float64], layout: Layout) -> tuple[float, str]:
    """Seconds of a step with the servers' policy in virtual time. seconds: [workers, steps]."""
    (workers, steps), each = seconds.shape, seconds.tolist()
    policy = ByStep(workers, layout.staleness, layout.backup)
    record = simulate(policy, workers, steps, lambda worker, step: float(each[worker][step]))
    why = f"it waits for a worker of {workers} that is {layout.staleness} steps behind"
    if layout.backup:
        why = f"it does not wait for the last {layout.backup} of {workers} workers"
    return max(one.arrived for one in record if one.update == steps - 1) / steps, why
