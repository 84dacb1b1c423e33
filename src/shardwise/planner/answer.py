"""Answer of a search: the question, the best results, and the number of candidates considered."""

from dataclasses import replace
from itertools import islice
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from shardwise.cluster import Cluster
from shardwise.codec import keyed
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.model_size import size_json
from shardwise.model.parameters import Model
from shardwise.planner.common import Alternative, against, as_fast, having, neighbours
from shardwise.planner.exact import ExactMemory, Refuses
from shardwise.planner.pricing import Priced
from shardwise.planner.ranking import (
    Bound,
    Candidate,
    CandidateIndex,
    Found,
    best_of,
    bound_of,
    exact_memory,
    price_places,
    search,
)
from shardwise.planner.space import Space, powers
from shardwise.predict.cluster_links import links_json
from shardwise.predict.time.pricing import Pricing
from shardwise.records import dataclass

One = TypeVar("One")
SHOWN, MOST = 3, 10
"""Answers that are printed, and that are ranked, where no number is given."""
LIMIT = 1_000_000
"""Most answers that are ranked."""


def numbers_of(top: int | None, by: str) -> tuple[int, int]:
    """(answers that are printed, answers that are ranked). top: the number of both; None for usual ones. Raises
    `UserError` for one below 1, or that is too many."""
    if top is not None and not 1 <= top <= LIMIT:
        raise UserError(f"--top must be a positive integer, at most {LIMIT:,}, not {top}")
    return top or (MOST if by == "pareto" else SHOWN), top or MOST


@dataclass(frozen=True, repr=False)
class Answer(Generic[One]):
    """The question of a search and its best answers."""

    model: Model
    cluster: Cluster
    workload: Workload
    engine: str
    """The profile of the software that is assumed."""
    by: str
    """The goal that ranks them."""
    usable: float
    """Bytes of a device that a run may use."""
    ranked: tuple[One, ...]
    """The best, best first."""
    considered: int
    """Legal candidates."""
    fitting: int
    """Candidates that fit; in training, by the lower bound of their bytes."""

    @property
    def winner(self) -> One:
        return self.ranked[0]

    def asked_json(self) -> dict[str, Any]:
        """The question and the numbers of candidates: fields that plans of training and of serving share."""
        keys = "workload engine by usable_bytes=usable considered fitting"
        links = {"cluster": str(self.cluster), "cluster_links": links_json(self.cluster)}
        return {"model": self.model.name, **size_json(self.model)} | links | keyed(self, keys)


By = Literal["throughput", "fastest", "memory", "cost", "pareto"]
ROUNDING = 1e-9
"""Share of a time within which two are equal: parts are added up in another order where there are many."""


@dataclass(frozen=True)
class Winners:
    """The best candidates of a search, with what explains the first."""

    best: tuple[Priced, ...]
    considered: int
    fitting: int
    """Candidates whose lower bound of bytes fits."""
    space: Space
    """The first one's."""
    pricing: Pricing
    exact: ExactMemory
    found: Found
    """The first one's search."""
    fastest: Priced | None = None
    """The fastest candidate that fits; None where nothing does."""
    same: tuple[Candidate, ...] = ()
    """Candidates that may fit and are as fast within the error, the most common first; where these were looked for."""

    def alternatives(self, usable: float) -> list[Alternative]:
        """For each neighboring value of a key, the fastest candidate that has it and fits. Values that only refused
        candidates have are left out."""
        winner, fastest, leanest = self.best[0], {}, {}
        choices = []
        for choice in neighbours(self.found.blocks, winner):
            blocks = having(self.found.blocks, *choice)
            if place := best_of(blocks, self.exact, "throughput", 1, usable):
                fastest[choice] = place[0]
            else:
                block = min(blocks, key=lambda block: float(block.nbytes.min()))
                at = int(np.argmin(block.nbytes))
                lean, leanest[choice] = block.place(at).layout, int(block.nbytes.flat[at])
                if leanest[choice] <= usable or self._refused(lean):  # the bound is not enough
                    lean = best_of(blocks, self.exact, "memory")[0].layout
                    leanest[choice] = self.exact.of(lean).bytes.total
                if self._refused(lean):
                    continue
            choices.append(choice)
        priced = dict(zip(fastest, self._priced(list(fastest.values())), strict=True))
        return [
            against(winner, *choice, priced.get(choice), leanest.get(choice, 0), self.space.cluster)
            for choice in choices
        ]

    def _refused(self, layout: Layout) -> bool:
        return bool(self.exact.refuses and self.exact.refuses(layout))

    def unlimited(self) -> Priced | None:
        """The fastest candidate if memory were no limit; None where that is the first."""
        block = min(self.found.blocks, key=lambda block: float(block.seconds.min()))
        at = int(np.argmin(block.seconds))
        assert self.fastest
        if not float(block.seconds.flat[at]) < self.fastest.seconds * (1 - ROUNDING):
            return None
        place = block.place(at)
        return None if self._refused(place.layout) else self._priced([place])[0]

    def _priced(self, places: list[CandidateIndex]) -> list[Priced]:
        return price_places(self.space, places, self.pricing, self.exact)


def winners(space: Space, by: By, top: int, usable: float, explain: bool, refuses: Refuses | None = None) -> Winners:
    """The search of a space. explain: price what does not fit, too, for the alternatives. refuses: None for nothing."""
    if by == "cost":
        return _cheapest(space, usable, top, refuses)
    if by == "fastest":
        return _searched(space, "throughput", usable, top, explain, refuses)
    result = _searched(space, by, usable, top, explain, refuses)
    return _most_common(result, usable, top) if by == "throughput" and result.best else result


def _most_common(result: Winners, usable: float, top: int) -> Winners:
    """The same, but of candidates that are as fast as the fastest within the error, the most common first."""
    space, fastest = result.space, result.best[0]
    same = as_fast(result.found.blocks, fastest.seconds, usable, space.cluster, space.workload.seq)
    fitting = (one.place for one in same if result.exact.total(one.place.layout, usable) <= usable)
    best = price_places(space, list(islice(fitting, top)), result.pricing, result.exact)
    known = {one.layout for one in best}
    best += [one for one in result.best if one.layout not in known]
    return replace(result, best=tuple(best[:top]), same=tuple(same))


def _searched(
    space: Space, by: Literal["throughput", "memory", "pareto"], usable: float, top: int, explain: bool,
    refuses: Refuses | None, bound: Bound | None = None,
) -> Winners:  # fmt: skip
    pricing = Pricing(space.cluster)
    exact = exact_memory(space, refuses)
    found = search(space, pricing, by, top, usable, unlimited=explain, exact=exact, bound=bound)
    fastest = min(found.best, key=lambda one: one.seconds, default=None)
    return Winners(found.best, found.considered, found.fitting, space, pricing, exact, found, fastest)


def _cheapest(space: Space, usable: float, top: int, refuses: Refuses | None) -> Winners:
    """The candidates of least device-seconds over clusters of 1, 2, 4, ... and all nodes."""
    bound = bound_of(space)
    parts = map(space.on_nodes, powers(space.cluster.nodes))
    searches = [_searched(part, "throughput", usable, top, True, refuses, bound) for part in parts]
    rows = [(one.layout.ranks * one.seconds, i, one, each) for each in searches for i, one in enumerate(each.best)]
    rows.sort(key=lambda row: row[:2])
    return replace(
        rows[0][3] if rows else searches[-1],
        best=tuple(row[2] for row in rows[:top]),
        considered=sum(each.considered for each in searches),
        fitting=sum(each.fitting for each in searches),
    )
