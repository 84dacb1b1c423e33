"""The best candidates of a space: exactly the k best by one figure, or all that no other beats in both time and memory.

Candidates are taken in the order of a figure that is exact (seconds) or never too high (the lower bound of bytes), and
followed event by event until no later one can be in the answer. Where nothing of a frame fits by the bound, nothing of
it is priced. Nothing else is left out.

Overlaps as a dimension of the search: variants of an engine profile with some overlaps switched off.

A plan for one engine uses its profile as it is. To learn what overlapping is worth, the search covers all
combinations, each once: a switch that changes nothing stays on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace
from functools import lru_cache
from itertools import product
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np

from shardwise.cluster import Cluster
from shardwise.layout import Layout
from shardwise.layout.optimizers import states_of
from shardwise.layout.units import usual_backend
from shardwise.model import ModelConfig
from shardwise.model.parameters import Model, count, count_trained
from shardwise.planner.bounds import ExactBound, MemoryBound, state_floor
from shardwise.planner.exact import EngineBound, ExactMemory, Refuses
from shardwise.planner.pricing import Priced, Prices, price_all
from shardwise.planner.rank_bound import MASTER, WEIGHT
from shardwise.planner.space import LayoutColumns, Space, ZeroChoice
from shardwise.predict.memory.engine_bytes import counts_engine
from shardwise.predict.memory.engine_rows import engine_memory
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import EngineProfile
from shardwise.records import dataclass


def host_bound(model: Model, frame: LayoutColumns, cluster: Cluster, optimizer: str) -> Any:
    """At least the bytes of the fullest node's host memory, an array that broadcasts to the frame's shape."""
    homes = frame.homes.layout
    if homes.offload_home == "none":
        return np.zeros((1, 1, 1))
    stage, ranks = frame.columns["zero"], frame.columns["shard"]
    many = np.array(frame.counts)[:, None, None] > 1
    state = len(states_of(optimizer)) * MASTER * homes.offload_fraction * (homes.offload_home == "cpu")
    gradient = np.where(stage >= 2, np.where(many, MASTER, WEIGHT), 0)
    parameters = WEIGHT * (homes.offload_params == "cpu")
    # Of experts, other ranks hold copies.
    copies = 1 if model.experts else frame.data / ranks
    held = (state + gradient) * count_trained(model) + parameters * count(model)
    return held * copies / cluster.nodes


SWITCHES = ("tensor_overlap", "grad_overlap", "gather_overlap", "pipeline_overlap")
"""Fields of an engine: what runs beside computation."""


@lru_cache
def variants(engine: EngineProfile) -> tuple[EngineProfile, ...]:
    return tuple(
        replace(engine, **dict[str, Any](zip(SWITCHES, chosen, strict=True)))
        for chosen in product((True, False), repeat=len(SWITCHES))
    )


def distinct(frame: LayoutColumns, engine: EngineProfile) -> Iterator[tuple[EngineProfile, tuple[ZeroChoice, ...]]]:
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


Bound = MemoryBound | EngineBound
By = Literal["throughput", "memory", "pareto"]
UNLIMITED = float("inf")


@dataclass(frozen=True)
class Block:
    """The candidates of one frame with one engine: arrays of the frame's shape."""

    frame: LayoutColumns
    engine: EngineProfile
    nbytes: Any
    """Lower bound of the fullest device's bytes; inf where a candidate is not possible."""
    seconds: Any = None
    """Seconds per step; inf where a candidate is not possible; None where the frame is not priced."""

    def only(self, keep: Any) -> Block:
        """The block without other candidates; keep: an array that broadcasts to the frame's shape."""
        if np.all(keep):
            return self
        seconds = None if self.seconds is None else np.where(keep, self.seconds, np.inf)
        return replace(self, nbytes=np.where(keep, self.nbytes, np.inf), seconds=seconds)

    def priced(self, prices: Prices) -> Block:
        """The block with seconds."""
        seconds = prices.seconds(self.frame, self.engine)
        return replace(self, seconds=np.where(np.isfinite(self.nbytes), seconds, np.inf))

    def place(self, at: int) -> CandidateIndex:
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


class Candidate(NamedTuple):
    """One candidate of a block."""

    seconds: float
    nbytes: float
    """Its lower bound, or its exact bytes."""
    place: CandidateIndex


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    best: tuple[Priced, ...]
    """The requested candidates, best first."""
    considered: int
    """Legal candidates."""
    fitting: int
    """Candidates whose lower bound of bytes fits: at least as many as do."""
    blocks: tuple[Block, ...] = field(default=(), repr=False)
    """The candidates that were ranked."""


def search(
    space: Space,
    pricing: Pricing,
    by: By = "throughput",
    top: int = 10,
    usable: float = UNLIMITED,
    overlaps: bool = False,
    unlimited: bool = False,
    exact: ExactMemory | None = None,
    bound: Bound | None = None,
) -> Found:
    """The best candidates of a space whose fullest device needs no more than `usable` bytes.

    by: "throughput", the `top` with the shortest step (equals: fewest bytes first); "memory", the `top` with the fewest
    bytes (equals: shortest step first); "pareto", all that no other one beats in both. overlaps: search over the
    engine's overlaps, too. unlimited: price what does not fit, too. exact: kept between searches of one model, workload
    and cluster. bound: of one model and workload, also on several clusters.
    """
    if state_floor(space) > usable and not (overlaps or unlimited):
        return Found((), space.size, 0)
    exact = exact or exact_memory(space)
    every, considered, fitting = [], 0, 0
    for shardings, block in blocks(space, exact, pricing, usable, overlaps, unlimited, bound=bound):
        every.append(block)
        considered += shardings * block.frame.orders_possible
        fitting += int(np.count_nonzero(np.isfinite(block.nbytes) & (block.nbytes <= usable)))
    best = best_of(every, exact, by, top, usable)
    return Found(tuple(price_places(space, best, pricing, exact)), considered, fitting, tuple(every))


def price_places(space: Space, places: Sequence[CandidateIndex], pricing: Pricing, exact: ExactMemory) -> list[Priced]:
    """Candidates with their seconds and bytes."""
    return price_all(space.model, [(place.layout, place.engine) for place in places], space.workload, pricing, exact)


def blocks(
    space: Space, exact: ExactMemory, pricing: Pricing | None, usable: float, overlaps: bool = False,
    unlimited: bool = False, frames: Iterable[LayoutColumns] | None = None, bound: Bound | None = None,
) -> Iterator[tuple[int, Block]]:  # fmt: skip
    """(how many shardings count, the block) for all blocks of a space. pricing: None for bytes alone. frames: those of
    the space, or some of them. bound: kept between clusters."""
    if bound is None or bound.backend != exact.backend:  # CPUs of one node have another one than those of several
        bound = bound_of(space)
    bounds: Bound | ExactBound = bound or ExactBound(exact.total)
    prices = pricing and Prices(space.model, space.workload, space.attention, pricing, space.frames, space.settings)
    frames = space.frames if frames is None else tuple(frames)
    bounds.add(frames)
    memory = space.cluster.host.memory_bytes
    for frame in frames:
        possible = np.array(frame.possible)[:, None, :]
        if memory is not None:
            possible = possible & (host_bound(space.model, frame, space.cluster, space.workload.optimizer) <= memory)
        nbytes = np.where(possible, bounds.total(frame), np.inf)
        variants = list(distinct(frame, space.engine)) if overlaps else [(space.engine, frame.shardings)]
        for engine, shardings in variants:
            chosen = np.array([sharding in shardings for sharding in frame.shardings])[None, :, None]
            block = Block(frame, engine, nbytes).only(chosen)
            if prices and (unlimited or (block.nbytes <= usable).any()):
                block = block.priced(prices)
            yield len(shardings), block


def exact_memory(space: Space, refuses: Refuses | None = None) -> ExactMemory:
    return ExactMemory(space.model, space.workload, space.cluster, refuses, space.engine.name, space.settings)


def bound_of(space: Space) -> Bound | None:
    """Bytes of candidates by the software of the space's engine: exactly, or at least; None for a traced module."""
    if not isinstance(space.model, ModelConfig):
        return None
    common = space.model, space.workload, space.attention, usual_backend(space.cluster)
    homes = replace(space.homes.layout, attention=space.attention)
    if counts_engine(space.engine.name, space.model, homes) and (memory := engine_memory(space.engine.name)):
        return EngineBound(*common, memory, space.settings)
    return MemoryBound(*common)


def best_of(
    blocks: Iterable[Block], exact: ExactMemory, by: By, top: int = 1, usable: float = UNLIMITED
) -> list[CandidateIndex]:
    """The best candidates of blocks by their exact bytes, best first; equals in the order in which they come."""
    blocks = list(blocks)
    if by == "pareto":
        return [one.place for one in _front(_ordered(blocks, by, None, usable)[0], exact, usable)]
    follow, count = {"throughput": _fastest, "memory": _leanest}[by], 4 * top + 24
    while True:
        rows, complete = _ordered(blocks, by, count, usable)
        best, settled = follow(rows, exact, top, usable)
        if settled or complete:
            return [one.place for one in best]
        count *= 8


def _fastest(rows: Iterable[Candidate], exact: ExactMemory, top: int, usable: float) -> tuple[list[Candidate], bool]:
    """The first `top` that fit of candidates in the order of time, and whether later ones are slower for certain."""
    best: list[Candidate] = []
    for one in rows:
        if len(best) >= top and one.seconds > best[-1].seconds:
            return _sorted(best, 0, 1)[:top], True
        nbytes = exact.total(one.place.layout, usable)
        if nbytes <= usable:
            best.append(one._replace(nbytes=nbytes))
    return _sorted(best, 0, 1)[:top], False


def _leanest(rows: Iterable[Candidate], exact: ExactMemory, top: int, usable: float) -> tuple[list[Candidate], bool]:
    """The `top` of fewest bytes of candidates in the order of their bounds, and whether later ones need more for
    certain."""
    best: list[Candidate] = []
    for one in rows:
        if len(best) >= top and one.nbytes > best[top - 1].nbytes:
            return best[:top], True
        limit = best[top - 1].nbytes if len(best) >= top else usable
        nbytes = exact.total(one.place.layout, limit)
        if nbytes <= limit and not (best and nbytes == inf):  # of what cannot be chosen at any size, one will do
            best = _sorted([*best, one._replace(nbytes=nbytes)], 1, 0)
    return best[:top], False


def _front(rows: Iterable[Candidate], exact: ExactMemory, usable: float) -> list[Candidate]:
    """Candidates that no other one beats in both seconds and bytes, from candidates in the order of time."""
    front: list[Candidate] = []
    least = usable
    for one in rows:
        if one.nbytes > least or (front and one.nbytes == least):
            continue
        nbytes = exact.total(one.place.layout, least)
        if nbytes > least or (front and nbytes == least):
            continue
        if front and front[-1].seconds == one.seconds:
            front.pop()
        front.append(one._replace(nbytes=nbytes))
        least = nbytes
    return front


def _sorted(rows: list[Candidate], *figures: int) -> list[Candidate]:
    return sorted(rows, key=lambda one: tuple(one[i] for i in figures))


def _ordered(blocks: Sequence[Block], by: By, count: int | None, usable: float) -> tuple[Iterator[Candidate], bool]:
    """The first `count` candidates that may fit, by seconds or by bound, then by the other; and whether all."""
    seconds, nbytes, block, index = _columns(blocks, by, count, usable)
    figures = (nbytes, seconds) if by == "memory" else (seconds, nbytes)
    order = np.lexsort((index, block, *reversed(figures)))
    complete = count is None or len(order) <= count
    rows = (
        Candidate(float(seconds[i]), float(nbytes[i]), blocks[block[i]].place(int(index[i])))
        for i in order[:count].tolist()
    )
    return rows, complete


def _columns(blocks: Sequence[Block], by: By, count: int | None, usable: float) -> list[Any]:
    """Seconds, bounds, blocks and flat indices of candidates that may fit, the first `count` and more among them."""
    columns: list[list[Any]] = [[np.empty(0)], [np.empty(0)], [np.empty(0, int)], [np.empty(0, int)]]
    limit, kept = np.inf, 0
    for number, each in enumerate(blocks):
        if each.seconds is None and by != "memory":
            continue
        nbytes = each.nbytes.ravel()
        seconds = np.zeros_like(nbytes) if each.seconds is None else each.seconds.ravel()
        figure = nbytes if by == "memory" else seconds
        at = np.flatnonzero((nbytes <= usable) & np.isfinite(nbytes) & (figure <= limit))
        if count is not None and len(at) > count:
            at = at[figure[at] <= np.partition(figure[at], count)[count]]
        for column, values in zip(columns, (seconds[at], nbytes[at], np.full(len(at), number), at), strict=True):
            column.append(values)
        kept += len(at)
        if count is not None and kept > 16 * count:
            figures = np.concatenate(columns[by == "memory"])
            limit = min(limit, np.partition(figures, count)[count])
            keep = figures <= limit
            columns = [[np.concatenate(column)[keep]] for column in columns]
            kept = len(columns[0][0])
    return [np.concatenate(column) for column in columns]
