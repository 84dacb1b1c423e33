"""The best candidates of a space: exactly the k best by one figure, or all that no other beats in both time and memory.

Memory comes first: where nothing of a frame fits, nothing of it is priced. Nothing else is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from shardwise.layout import Layout
from shardwise.planner.exact import Exact
from shardwise.planner.fitting import Memory
from shardwise.planner.overlaps import distinct
from shardwise.planner.pricing import Priced, Prices, price_all
from shardwise.planner.space import LayoutColumns, Space, ZeroChoice
from shardwise.predict.time.features import Features
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile

By = Literal["throughput", "memory", "pareto"]
UNLIMITED = float("inf")


@dataclass(frozen=True)
class Block:
    """The candidates of one frame with one engine: arrays of the frame's shape.

    seconds: of a step, inf where one is not possible or does not fit. nbytes: of the fullest device, inf where one is
    not possible. some: whether any fits, or may. unlimited: seconds whether it fits or not, where that was asked for.
    near: `seconds`, and those of candidates that may fit although their bytes in closed form do not.
    """

    frame: LayoutColumns
    engine: EngineProfile
    seconds: Any
    nbytes: Any
    some: bool
    unlimited: Any
    near: Any

    def only(self, rows: Sequence[bool]) -> Block:
        """The block without the candidates of the other rows."""
        if all(rows):
            return self
        keep = np.array(rows)[:, None, None]
        seconds, nbytes, near = (np.where(keep, figures, np.inf) for figures in (self.seconds, self.nbytes, self.near))
        unlimited = None if self.unlimited is None else np.where(keep, self.unlimited, np.inf)
        some = self.some and bool(np.isfinite(near).any())
        return replace(self, seconds=seconds, nbytes=nbytes, some=some, unlimited=unlimited, near=near)

    def with_near(self) -> Block:
        """The block with seconds of what may fit, too."""
        return replace(self, seconds=self.near)

    def place(self, at: int) -> CandidateIndex:
        """Where the candidate with this index in the flat arrays is."""
        row, sharding, order = (int(n) for n in np.unravel_index(at, self.frame.shape))
        return CandidateIndex(self.frame, self.engine, row, sharding, order)


class CandidateIndex(NamedTuple):
    """Index of a candidate: its frame, and what was chosen of each list."""

    frame: LayoutColumns
    engine: EngineProfile
    row: int
    sharding: int
    order: int

    @property
    def layout(self) -> Layout:
        frame = self.frame
        return frame.layout(frame.rows[self.row], frame.shardings[self.sharding], frame.orders[self.order])


class Kept(NamedTuple):
    """A candidate that a search has kept."""

    seconds: float
    place: CandidateIndex


class Keeper(Protocol):
    """What sees all blocks of a search and keeps what it is for."""

    def offer(self, block: Block) -> None:
        """Look at one block."""


@dataclass(frozen=True)
class Found:
    """Result of a search. best: the requested candidates, best first. considered: number of legal candidates. fitting:
    number that fits. beyond: the best one of all, also outside the features that were ranked."""

    best: tuple[Priced, ...]
    considered: int
    fitting: int
    beyond: Priced | None = None


class Listing(NamedTuple):
    """Which candidates of a search's answer are looked at, one after the other, until enough of them fit."""

    exact: Exact
    """Follows a rank's actions."""
    slack: float = 1.0
    """Candidates are looked at whose bytes in closed form are up to this many times what is usable."""


MOST_LISTED = 1000
"""Candidates that are followed action by action, at most, before a search gives up."""


def search(
    space: Space,
    pricing: Pricing,
    by: By = "throughput",
    top: int = 10,
    usable: float = UNLIMITED,
    overlaps: bool = False,
    keepers: Sequence[Keeper] = (),
    unlimited: bool = False,
    ranked: Features | None = None,
    listing: Listing | None = None,
) -> Found:
    """The best candidates of a space whose fullest device needs no more than `usable` bytes.

    by: "throughput", the `top` with the shortest step (equals: fewest bytes first); "memory", the `top` with the fewest
    bytes (equals: shortest step first); "pareto", all that no other one beats in both. overlaps: search over the
    engine's overlaps, too. keepers: who else looks at every block; unlimited: they want to know what does not fit, too.
    ranked: features of the software whose candidates are counted, ranked and offered to the keepers, if not all.
    listing: have what is found fit by `estimate`'s bytes; without it, bytes are those in closed form.
    """
    spare = 4 * top + 24 if listing else top
    while True:
        result = _once(space, pricing, by, spare, usable, overlaps, keepers, unlimited, ranked, listing)
        kept, first, considered, fitting, memory = result
        best = listed(kept.rows(), by, top, usable, listing)
        if by == "pareto" or len(best) == top or len(kept.rows()) < spare or spare > MOST_LISTED:
            break
        spare, keepers = 4 * spare, ()
    places = [*best, *listed(first.rows(), "throughput" if by == "pareto" else by, 1, usable, listing)]
    priced = price_places(space, places, pricing, memory, listing)
    beyond = priced.pop() if len(places) > len(best) else None
    return Found(tuple(priced), considered, max(fitting, len(best)), beyond)


def _once(
    space: Space, pricing: Pricing, by: By, spare: int, usable: float, overlaps: bool, keepers: Sequence[Keeper],
    unlimited: bool, ranked: Features | None, listing: Listing | None,
) -> tuple[_Top | _Front, _Top, int, int, Memory]:  # fmt: skip
    """One pass over all blocks of a space: the best ranked and the best of all, and how many are legal and fit."""
    best: _Top | _Front = _Front() if by == "pareto" else _Top(spare, _ORDER[by])
    first = _Top(24 if listing else 1, _ORDER["throughput" if by == "pareto" else by])
    considered = fitting = 0
    reach = usable * listing.slack if listing else usable
    memory = Memory(space.model, space.workload, space.attention)
    # Only in the order of time are layouts that may fit ranked among fitting ones, and followed.
    nearest = listing.exact.least if listing and by == "throughput" else None
    for shardings, block in blocks(space, memory, pricing, reach, overlaps, unlimited, nearest):
        rows = block.frame.runs_on(ranked or space.features)
        if ranked:
            first.offer(block)
        mine = block.only(rows)
        considered += shardings * sum(sum(of) for of, runs in zip(block.frame.possible, rows, strict=True) if runs)
        best.offer(mine.with_near())
        for keeper in keepers:
            keeper.offer(mine)
        if mine.some:
            fitting += int(np.count_nonzero(np.isfinite(mine.seconds) & (mine.nbytes <= usable)))
    return best, first, considered, fitting, memory


def listed(rows: Iterable[Kept], by: By, top: int, usable: float, listing: Listing | None) -> list[CandidateIndex]:
    """The first `top` of candidates in closed form's order that fit by their exact bytes, in the order of these."""
    if listing is None:
        return [row.place for row in rows][: None if by == "pareto" else top]
    exact: list[tuple[float, float, CandidateIndex]] = []
    for row in rows:
        nbytes = listing.exact.of(row.place.layout, usable)[0].total
        if nbytes <= usable:
            exact.append((row.seconds, nbytes, row.place))
        if len(exact) == {"throughput": top, "memory": 2 * top + 4}.get(by):
            break
    if by == "pareto":
        seconds, nbytes_of = (np.array([one[i] for one in exact]) for i in (0, 1))
        return [exact[i][2] for i in _front(seconds, nbytes_of).tolist()] if exact else []
    figures = (1, 0) if by == "memory" else (0, 1)
    return [one[2] for one in sorted(exact, key=lambda one: tuple(one[i] for i in figures))[:top]]


def price_places(
    space: Space, places: Sequence[CandidateIndex], pricing: Pricing, memory: Memory | None, listing: Listing | None
) -> list[Priced]:
    """Candidates with their figures, and with exact bytes where `listing` has them."""
    chosen = [(place.layout, place.engine) for place in places]
    priced = price_all(space.model, chosen, space.workload, pricing, memory)
    return [listing.exact.priced(one) for one in priced] if listing else priced


def blocks(
    space: Space, memory: Memory, pricing: Pricing, usable: float, overlaps: bool = False, unlimited: bool = False,
    least: Callable[[LayoutColumns], Any] | None = None,
) -> Iterator[tuple[int, Block]]:  # fmt: skip
    """(how many shardings count, the block) for all blocks of a space. least: what a device needs of the bytes in
    closed form, at least; so much of a candidate's has to be usable for it to be `near`."""
    prices = Prices(space.model, space.workload, space.attention, pricing, space.frames)
    for frame in space.frames:
        possible = np.array(frame.possible)[:, None, :]
        nbytes = np.where(possible, memory.total(frame), np.inf)
        variants = list(distinct(frame, space.engine)) if overlaps else [(space.engine, frame.shardings)]
        for engine, shardings in variants:
            fits = (nbytes <= usable) & _chosen(frame, shardings) & possible
            near = ((nbytes * least(frame) <= usable) & _chosen(frame, shardings) & possible) if least else fits
            some = bool(near.any())
            seconds = prices.seconds(frame, engine) if some or unlimited else np.inf
            yield (
                len(shardings),
                Block(
                    frame,
                    engine,
                    np.where(fits, seconds, np.inf),
                    nbytes,
                    some,
                    np.where(possible, seconds, np.inf) if unlimited else None,
                    np.where(near, seconds, np.inf),
                ),
            )


def _chosen(frame: LayoutColumns, shardings: tuple[ZeroChoice, ...]) -> Any:
    return np.array([sharding in shardings for sharding in frame.shardings])[None, :, None]


class _Top:
    """The k best of all blocks by one figure, then by the other, then in the order in which they came."""

    def __init__(self, k: int, figures: Callable[[Block], tuple[Any, Any]]) -> None:
        self._k, self._figures = k, figures
        self._rows: list[tuple[float, float, int, float, CandidateIndex]] = []
        self._limit, self._serial = np.inf, 0

    def offer(self, block: Block) -> None:
        self._serial += block.nbytes.size
        if not block.some:
            return
        first, second = (figure.ravel() for figure in self._figures(block))
        at = np.flatnonzero((first <= self._limit) & np.isfinite(first))
        if not len(at):
            return
        if len(at) > self._k:
            at = at[first[at] <= np.partition(first[at], self._k - 1)[self._k - 1]]
        for i in at[np.lexsort((at, second[at], first[at]))][: self._k].tolist():
            seconds = float(block.seconds.flat[i])
            self._rows.append((float(first[i]), float(second[i]), self._serial + i, seconds, block.place(i)))
        self._rows = sorted(self._rows, key=lambda row: row[:3])[: self._k]
        self._limit = self._rows[-1][0] if len(self._rows) == self._k else np.inf

    def rows(self) -> list[Kept]:
        return [Kept(*row[3:]) for row in self._rows]


class _Front:
    """Those that no other candidate beats in both seconds and bytes, fastest first."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, CandidateIndex]] = []

    def offer(self, block: Block) -> None:
        if not block.some:
            return
        seconds, nbytes = block.seconds.ravel(), block.nbytes.ravel()
        at = np.flatnonzero(np.isfinite(seconds))
        for i in at[_front(seconds[at], nbytes[at])].tolist():
            self._rows.append((float(seconds[i]), float(nbytes[i]), block.place(i)))
        if len(self._rows) > 10_000:
            self._cut()

    def _cut(self) -> None:
        keep = _front(np.array([row[0] for row in self._rows]), np.array([row[1] for row in self._rows]))
        self._rows = [self._rows[i] for i in keep]

    def rows(self) -> list[Kept]:
        self._cut()
        return [Kept(row[0], row[2]) for row in self._rows]


def _front(seconds: Any, nbytes: Any) -> Any:
    """Indices of the front, fastest first; of equals the first one."""
    order = np.lexsort((nbytes, seconds))
    least = np.minimum.accumulate(nbytes[order])
    return order[np.concatenate([[True], nbytes[order][1:] < least[:-1]])[: len(order)]]


_ORDER: dict[str, Callable[[Block], tuple[Any, Any]]] = {
    "throughput": lambda block: (block.seconds, block.nbytes),
    "memory": lambda block: (np.where(np.isfinite(block.seconds), block.nbytes, np.inf), block.seconds),
}
