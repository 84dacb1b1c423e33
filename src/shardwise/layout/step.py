"""One step of a rank's plan: counts of what it does, and the name of its ranks."""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from shardwise.layout.units import UnitPlan

K = TypeVar("K")


def count_step(plan: UnitPlan, of_step: Callable[[UnitPlan], Counter[K]]) -> Counter[K]:
    """Value of `of_step` for a plan's step, extrapolated from the short step and from one that is a period longer.

    of_step: counts something that occurs equally often in every period of the steady state.
    """
    found, repeats = of_step(plan.short), (plan.micro_batches - plan.short.micro_batches) // plan.pipeline.period
    if repeats:
        found = Counter({key: found[key] + repeats * (n - found[key]) for key, n in of_step(plan.longer).items()})
    return found


def role_of(plan: UnitPlan) -> str:
    """Name, in reports, of the ranks at a plan's place in the pipeline."""
    stages = list(map(str, plan.stages))
    if len(stages) > 4:  # a table of 80 columns has room for the numbers beside them
        stages = [*stages[:2], f"... {stages[-1]}"]
    return "all" if not plan.pipeline.staged else f"stage{'s' * (len(stages) > 1)} {', '.join(stages)}"
