"""The answer of a search: the best layouts, the best that cannot run here yet, and the best with another choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shardwise.planner import shortfall
from shardwise.planner.alternatives import Alternative, against, having, neighbours
from shardwise.planner.exact import ExactMemory
from shardwise.planner.pricing import Priced
from shardwise.planner.ranking import CandidateIndex, Found, best_of, price_places, search
from shardwise.planner.runnable import OWN, needs, widened
from shardwise.planner.space import Space
from shardwise.predict.time.features import Features
from shardwise.predict.time.pricing import Pricing
from shardwise.report.units import format_bytes

By = Literal["throughput", "memory", "cost", "pareto"]


@dataclass(frozen=True)
class Winners:
    """The best candidates of a search, with what explains the first."""

    best: tuple[Priced, ...]
    considered: int
    fitting: int
    """Candidates whose lower bound of bytes fits."""
    beyond: Priced | None
    """The best candidate of all, also with features that were not ranked."""
    space: Space
    """The first one's."""
    pricing: Pricing
    exact: ExactMemory
    found: Found
    """The first one's search."""

    def alternatives(self, usable: float) -> list[Alternative]:
        """For each neighboring value of a key, the fastest candidate that has it and fits."""
        winner, fastest, leanest = self.best[0], {}, {}
        choices = list(neighbours(self.found.blocks, winner))
        for choice in choices:
            blocks = having(self.found.blocks, *choice)
            if place := best_of(blocks, self.exact, "throughput", 1, usable):
                fastest[choice] = place[0]
            else:
                leanest[choice] = self.exact.total(best_of(blocks, self.exact, "memory")[0].layout)
        priced = dict(zip(fastest, self._priced(list(fastest.values())), strict=True))
        return [
            against(winner, *choice, priced.get(choice), leanest.get(choice, 0), self.space.cluster)
            for choice in choices
        ]

    def unlimited(self) -> Priced | None:
        """The fastest candidate if memory were no limit; None where that is the first."""
        block = min(self.found.blocks, key=lambda block: float(block.seconds.min()))
        at = int(np.argmin(block.seconds))
        if not float(block.seconds.flat[at]) < self.best[0].seconds:
            return None
        return self._priced([block.place(at)])[0]

    def better(self, by: By) -> Priced | None:
        """The best candidate that this runtime cannot run yet, if it is better than all that it can run."""
        one, winner = self.beyond, self.best[0]
        if one is None or not needs(one.layout):
            return None
        figures: dict[By, Callable[[Priced], float]] = {
            "memory": lambda one: one.held.total,
            "cost": lambda one: one.layout.ranks * one.seconds,
        }
        figure = figures.get(by, lambda one: one.seconds)
        return one if figure(one) < figure(winner) else None

    def _priced(self, places: list[CandidateIndex]) -> list[Priced]:
        return price_places(self.space, places, self.pricing, self.exact)


def winners(space: Space, by: By, top: int, usable: float, explain: bool) -> Winners:
    """The search of a space. With `explain`, for this runtime, also for the best layout that it cannot run yet."""
    ranked = space.features if explain and space.engine.name in OWN and not space.features.context else None
    wide = replace(space, engine=widened(space.engine)) if ranked else space
    if by == "cost":
        return _cheapest(wide, usable, top, ranked)
    return _searched(wide, by, usable, top, ranked, explain)


def _searched(
    space: Space, by: Literal["throughput", "memory", "pareto"], usable: float, top: int, ranked: Features | None,
    explain: bool,
) -> Winners:  # fmt: skip
    pricing, exact = Pricing(space.cluster), ExactMemory(space.model, space.workload, space.cluster)
    found = search(space, pricing, by, top, usable, unlimited=explain, ranked=ranked, exact=exact)
    return Winners(found.best, found.considered, found.fitting, found.beyond, space, pricing, exact, found)


def _cheapest(space: Space, usable: float, top: int, ranked: Features | None) -> Winners:
    """The candidates of least device-seconds over clusters of 1, 2, 4, ... and all nodes."""
    nodes = space.cluster.nodes
    counts = sorted({nodes, *(2**k for k in range(nodes.bit_length()) if 2**k <= nodes)})
    parts = (replace(space, cluster=replace(space.cluster, nodes=count)) for count in counts)
    searches = [_searched(part, "throughput", usable, top, ranked, explain=True) for part in parts]

    def cost(one: Priced) -> float:
        return one.layout.ranks * one.seconds

    rows = [(cost(one), i, one, each) for each in searches for i, one in enumerate(each.best)]
    rows.sort(key=lambda row: row[:2])
    return replace(
        rows[0][3] if rows else searches[-1],
        best=tuple(row[2] for row in rows[:top]),
        considered=sum(each.considered for each in searches),
        fitting=sum(each.fitting for each in searches),
        beyond=min((each.beyond for each in searches if each.beyond), key=cost, default=None),
    )


def beyond_what_runs(space: Space, by: By, top: int, usable: float) -> tuple[Winners, str]:
    """If no layout of this runtime fits: the search over layouts that it cannot run yet, and the missing features."""
    result = winners(replace(space, engine=widened(space.engine)), by, top, usable, explain=True)
    if not result.best:
        return result, ""
    leanest = shortfall.least(space)
    why = f" (the leanest layout, {leanest.layout}, needs {format_bytes(leanest.nbytes)} per device)" if leanest else ""
    return result, f"{needs(result.best[0].layout)}; without it nothing fits{why}"
