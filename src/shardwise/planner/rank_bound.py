"""A lower bound of one rank's bytes, for many candidates at once.

Every term counts only bytes that `predict.memory` counts at one moment of the step: states, the micro-batches that a
schedule's own order has in flight as a backward begins (`occupancy.py`), gradients that earlier backwards have left,
and the tensors of that backward. Messages and some of what is on its way are left out, so that the sum is never more
than the bytes of `estimate`; a test compares the two.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardwise.arrays import Array, Num
from shardwise.layout import Layout
from shardwise.layout.pipeline import releases_early
from shardwise.layout.unit import Backend, Unit, frozen_of, narrow_of
from shardwise.model import ModelConfig
from shardwise.planner.occupancy import FIRST, LAST, MIDDLE, WHOLE, moments
from shardwise.planner.space import LayoutColumns
from shardwise.predict.memory.engine_bytes import dense_blocks, part_elements
from shardwise.predict.memory.step import state_bytes
from shardwise.predict.time.step import narrow
from shardwise.report.step_report import DTYPE_BYTES

MOST_ENDS = 4
"""Most units of a rank beside its blocks'."""
WEIGHT, MASTER = DTYPE_BYTES["bfloat16"], DTYPE_BYTES["float32"]


class MicroBatchBytes(NamedTuple):
    """Bytes of one micro-batch, arrays over rows. `apart`: where gradients of weights are computed later."""

    embedding: Num
    """Saved by the embedding."""
    block: Num
    """Saved by a block."""
    head: Num
    """Saved by the head."""
    known_embedding: Num
    """Inputs of the step among the saved."""
    known_head: Num
    kept_embedding: Num
    """Kept from the gradient of the input to that of the weights."""
    kept_block: Num
    loss: Num
    """Transients of the loss."""
    in_head: Num
    """Transients of the head's backward."""
    in_block: Num
    """Transients of a block's backward."""
    in_block_apart: Num
    in_embedding: Num
    """Transients of the embedding's backward."""
    in_embedding_apart: Num
    inputs: Num
    """Inputs of a micro-batch on a rank with blocks alone."""
    tables: Num
    """Shared by the blocks."""


@cache
def _early(recompute: str) -> bool:
    return releases_early(Layout(recompute=recompute))


class RankBound:
    """One rank of every candidate of a frame."""

    def __init__(
        self, model: ModelConfig, frame: LayoutColumns, place: int, units: dict[str, Unit], micro: MicroBatchBytes,
        backend: Backend, optimizer: str,
    ) -> None:  # fmt: skip
        self.frame, self.place, self.micro, self.backend = frame, place, micro, backend
        self.state_bytes = state_bytes("bf16", optimizer)
        self.layers: Num = narrow(np.array([held[place] for held in frame.held]))
        homes = frame.homes.layout
        self.offload_home, self.fraction = homes.offload_home, homes.offload_fraction
        self.on_host = homes.offload_home != "none"
        """Whether stages 2 and 3 accumulate gradients in the host's memory."""
        self.stage = frame.columns["zero"][0]
        # An array in the place of a number: a unit's sizes then are arrays.
        ranks: Any = frame.columns["shard"][0]
        first, last = place == 0, place == frame.pp - 1
        here = {"embedding": first, "tied": first or last, "blocks.0": True, "head": last}
        beside = frozen_of(""), narrow_of("")
        there = [u for name, u in units.items() if here[name.removesuffix(beside[0]).removesuffix(beside[1])]]
        cut = {unit.name: replace(unit, shard_ranks=ranks) for unit in there}
        self.padded: dict[str, Num] = {name: unit.padded for name, unit in cut.items() if not unit.frozen}
        self.shard: dict[str, Num] = {name: unit.shard_numel for name, unit in cut.items() if not unit.frozen}
        self.frozen: dict[str, Unit] = {name: unit for name, unit in cut.items() if unit.frozen}
        self.mixture = bool(model.experts)
        self.extra: Num = 0
        self.mean = self.padded["blocks.0"], self.shard["blocks.0"]
        if self.mixture:
            blocks = _mixed_blocks(model, frame, place, self.layers)
            self.mean, (self.padded["blocks.0"], self.shard["blocks.0"]), self.extra = blocks
        self.counts = np.array(frame.counts)[:, None, None]
        self.many, self.sharded = self.counts > 1, self.stage >= 2
        # A shard group of one rank, as offloading may have, has nothing to wait for.
        self.in_flight = self.sharded & (ranks > 1)
        self.virtual = np.array([order.virtual for order in frame.orders])
        self.kinds = (
            (WHOLE,) if first and last
            else tuple(kind for kind, there in ((FIRST, first), (LAST, last)) if there)
            + ((MIDDLE,) if max(order.virtual for order in frame.orders) > 1 or not (first or last) else ())
        )  # fmt: skip
        # Several chunks are as large, but for what the ends count as.
        entry, exit = np.array([order.ends for order in frame.orders]).T
        less = {FIRST: entry, LAST: exit, WHOLE: 0, MIDDLE: 0}
        chunk = (model.layers + entry + exit) / (frame.pp * self.virtual)
        self.blocks = {kind: np.where(self.virtual == 1, self.layers, chunk - less[kind]) for kind in self.kinds}
        delayed = np.array([order.schedule == "zb-h1" for order in frame.orders])
        early = np.array([_early(row.recompute) and not self.frozen for row in frame.rows])[:, None, None]
        self.apart = {kind: delayed | (early & (frame.pp > 1) & (kind not in (FIRST, WHOLE))) for kind in self.kinds}

    def total(self) -> Num:
        """At least the bytes of this rank."""
        gathered = self.stage == 3
        padded, shard = self._elements
        # On the device, of an element of an interval at stage 3 (`predict.memory.step.parameter_bytes`).
        there = WEIGHT if self.frame.homes.offload_params == "none" else 0
        interval = MASTER if self.offload_home == "none" else there
        parameters = np.where(gathered, shard * interval, padded * WEIGHT)
        optimizer = self._updated_here(shard, 2 * self.layers + MOST_ENDS) * self.state_bytes
        if self.offload_home == "none":
            optimizer = optimizer - np.where(gathered, shard * MASTER, 0)
        copies = np.array([[s.copied] for s in self.frame.shardings]) * (not self.mixture)
        lasting = parameters + optimizer + np.floor(padded * copies) * WEIGHT + self._frozen_bytes()
        return lasting + self.micro.inputs * self.counts + self._slots() + self._most()

    def _frozen_bytes(self) -> Num:
        total: Num = 0
        for name, unit in self.frozen.items():
            width = DTYPE_BYTES[unit.dtype] if unit.dtype else WEIGHT
            of_one = np.where(self.stage == 3, unit.shard_numel, unit.numel) * width
            total = total + of_one * (self.layers if name in (frozen_of("blocks.0"), narrow_of("blocks.0")) else 1)
        return total

    def _updated_here(self, shard: Num, units: Num) -> Num:
        """At least the elements of `units` units whose optimizer state is on the device: of each unit, the part that is
        not is rounded up."""
        if self.offload_home == "none":
            return shard
        return np.maximum(shard * (1 - self.fraction) - units, 0) if self.fraction < 1 else 0.0 * shard

    @cached_property
    def _elements(self) -> tuple[Num, Num]:
        edges = [sum(size for name, size in sizes.items() if name != "blocks.0") for sizes in (self.padded, self.shard)]
        return edges[0] + self.layers * self.mean[0], edges[1] + self.layers * self.mean[1]

    def _slots(self) -> Num:
        """Bytes of the slots of stage 3 without a pipeline: two that units take in turn, and a tied table's own."""
        if self.frame.pp > 1:
            return 0
        edges = [self.padded[name] for name in ("embedding", "head") if name in self.padded]
        outer = _most([*edges, self.padded["blocks.0"]] if self.layers > 2 else edges)
        return (self.padded["blocks.0"] + outer + self.padded.get("tied", 0)) * WEIGHT * (self.stage == 3)

    def _sum(self, of: Any, kind: int, names: str = "all") -> Num:
        """Sum over the units of a stage of this kind: its blocks, and what it has besides."""
        ends = {FIRST: ("embedding", "tied"), LAST: ("head", "tied"), WHOLE: ("embedding", "tied", "head"), MIDDLE: ()}
        edge = sum(of(name) for name in ends[kind] if name in self.padded)
        return edge + self.blocks[kind] * of("blocks.0") if names == "all" else edge

    def _accumulated(self, name: str) -> Num:
        """Bytes of a unit's accumulator; several micro-batches are summed in fp32."""
        elements = np.where(self.sharded, self.shard[name] * (not self.on_host), self.padded[name])
        return elements * np.where(self.many, MASTER, WEIGHT)

    def _staged(self, name: str) -> Num:
        """Bytes of a unit's full gradient on its way into the accumulator."""
        if name not in self.padded:
            return 0
        return self.padded[name] * WEIGHT * (self.sharded | self.many)

    @property
    def _under_way(self) -> Num:
        """Bytes of a block's full gradient until the next unit's is complete. Experts, a unit besides, land apart."""
        return 0.0 if self.mixture else self._staged("blocks.0")

    def _most(self) -> Num:
        """At least the bytes beyond what lasts through a step."""
        padded, shard = self._elements
        most: Num = np.where(self.sharded, shard * (not self.on_host), padded) * np.where(self.many, MASTER, WEIGHT)
        if FIRST not in self.kinds and WHOLE not in self.kinds:
            most = most + self._under_way * self.in_flight
        if self.backend == "nccl" and not self.mixture:
            most = most + MASTER * self._updated_here(_most(self.shard.values()), 1) * ~self.many
        if self.frame.pp == 1:
            most = most + self.micro.tables - self.micro.known_embedding - self.micro.known_head
        for held in self._moments():
            most = np.maximum(most, held)
        return most

    def _moments(self) -> Iterator[Num]:
        s, kinds = self.micro, self.kinds
        saved = {kind: self.blocks[kind] * s.block + self._ends_saved(kind) for kind in kinds}
        kept = {kind: self.blocks[kind] * s.kept_block + (s.kept_embedding if kind == FIRST else 0.0) for kind in kinds}
        gradients = {kind: self._sum(self._accumulated, kind) for kind in kinds}
        weights = {kind: self._sum(self.padded.__getitem__, kind) * WEIGHT * (self.stage == 3) for kind in kinds}
        inside = {kind: self._inside(kind) for kind in kinds}
        attending = np.maximum(self.virtual, 1)
        late = self.extra * (MASTER - WEIGHT) * (self.sharded & self.many)
        gathers = self.frame.pp > 1 and (self.stage == 3).any()
        delays = any(order.schedule == "zb-h1" for order in self.frame.orders)
        for (kind, after), saving, keeping, there in self._columns():
            in_flight = sum(saving[each] * (self.blocks[each] > 0) for each in kinds)
            held = np.ceil(in_flight / attending) * s.tables
            for each in kinds:
                held = held + saving[each] * saved[each] + (keeping[each] * kept[each] if delays else 0.0)
            held = held + sum(there[each] * gradients[each] for each in kinds)
            if gathers:
                held = held + _choose(kind, weights) + _choose(after, weights)
            # One unit's full gradient may be there in place of an accumulator, which is larger where ZeRO does not cut.
            yield held - late + _choose(kind, inside)

    def _ends_saved(self, kind: int) -> Num:
        """Bytes that a stage saves besides its blocks', without inputs of the step."""
        s = self.micro
        embedding = s.embedding - s.known_embedding if kind in (FIRST, WHOLE) else 0.0
        return embedding + (s.head - s.known_head if kind in (LAST, WHOLE) else 0.0)

    def _columns(self) -> Iterator[tuple[tuple[int, int], Array, Array, Array]]:
        """For each moment, arrays of rows x 1 x orders: its kind and the next; and by kind its counts of saved, kept
        and accumulated."""
        frame = self.frame
        counts, row = np.unique(frame.counts, return_inverse=True)
        table = [[_numbers(order.schedule, frame.pp, m, order.virtual, self.place) if possible else NONE
                  for order, possible in zip(frame.orders, frame.possible[frame.counts.index(m)], strict=True)]
                 for m in counts.tolist()]  # fmt: skip
        most = max(len(each) for of_count in table for each in of_count)
        # [counts, orders, moments, numbers]
        full = np.array([[each + each[:1] * (most - len(each)) for each in of_count] for of_count in table])
        # [moments, numbers, rows, 1, orders]
        for columns in full.transpose(2, 3, 0, 1)[:, :, row, None]:
            yield columns[:2], columns[2:6], columns[6:10], columns[10:]

    def _inside(self, kind: int) -> Num:
        """The most bytes of one backward of a stage beyond what is saved as it begins."""
        s, blocks, apart = self.micro, self.blocks[kind], self.apart[kind]
        has_head, piped = kind in (LAST, WHOLE), self.frame.pp > 1
        block, tied, head = self._staged("blocks.0"), self._staged("tied"), self._staged("head") * has_head
        in_block = np.where(apart, s.in_block_apart, s.in_block)
        # Full gradients stay until the whole stage is done; without a pipeline, a unit's until the next is complete.
        stays = (self.in_flight & piped) | (apart & self.many)
        follows = 0.0 if piped else self._under_way * self.in_flight
        own, above = head + tied * has_head, s.head * has_head
        waits = own * stays if piped else tied + head * self.in_flight
        staged = np.where(stays, blocks * block + own, block + (0 if piped else tied)) + follows * (blocks > 1)
        kept = apart * (blocks - 1) * s.kept_block
        cases: list[Num] = [
            np.where(blocks > 0, in_block - above + block + waits, 0.0),
            np.where(blocks > 0, in_block - above - (blocks - 1) * s.block + kept + staged, 0.0),
        ]
        if has_head:
            cases += [s.loss, s.in_head + own]
        if kind in (FIRST, WHOLE):
            inside = np.where(apart, s.in_embedding_apart, s.in_embedding) - s.embedding
            staged = self._staged("embedding") + tied + (blocks * block * stays if piped else follows)
            cases.append(inside - above + blocks * (apart * s.kept_block - s.block) + staged)
        return _most(cases)


def _most(numbers: Iterable[Num]) -> Num:
    most: Num = 0
    for number in numbers:
        most = np.maximum(most, number)
    return most


def _mixed_blocks(model: ModelConfig, frame: LayoutColumns, place: int, layers: Num) -> tuple[Any, Any, Num]:
    """Elements of one of the `layers` blocks of a pipeline's rank, whole and one rank's shard of it, arrays of
    shardings x orders: the mean, and the smallest block's; and the elements of experts that no other rank holds.
    Experts have other ranks to be sharded over."""
    stage, ranks = frame.columns["zero"][0], frame.columns["shard"][0]
    same = np.where(stage > 0, frame.expert_replicas, 1)
    dense = np.array([sum(dense_blocks(model, frame.stages(o), frame.pp, place)) for o in frame.orders])
    blocks = [part_elements(model, frame.tp, frame.expert_tp, frame.ep, "block", routed) for routed in (False, True)]
    (without, own), experts = (trained + frozen for trained, _, frozen in blocks), blocks[1][1]

    def whole_and_shard(*parts: tuple[int, Num]) -> tuple[Num, Num]:
        shards = [(-(-numel // n), n) for numel, n in parts]
        return sum(shard * n for shard, n in shards), sum(shard for shard, _ in shards)

    plain, mixed = (
        whole_and_shard((without, ranks)),
        whole_and_shard((own or without, ranks), (experts, same)),
    )
    mean = [(dense * a + (layers - dense) * b) / layers for a, b in zip(plain, mixed, strict=True)]
    smallest = [np.where(dense == 0, b, np.minimum(a, b)) for a, b in zip(plain, mixed, strict=True)]
    return mean, smallest, np.where(same == 1, experts, 0)


NONE = [[-1] * 2 + [0] * 12]
"""In place of the moments of a schedule that is not possible."""


@lru_cache(maxsize=4096)
def _numbers(schedule: str, p: int, m: int, v: int, place: int) -> list[list[int]]:
    return [[*each[:2], *each.saved, *each.kept, *each.accumulated] for each in moments(schedule, p, m, v, place)]


def _choose(which: Num, of: dict[int, Num]) -> Num:
    """The value of the kind that an array names; 0 for none of them."""
    found: Num = 0.0
    for kind, value in of.items():
        found = np.where(which == kind, value, found)
    return found
