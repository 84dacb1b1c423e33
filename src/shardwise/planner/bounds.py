"""A lower bound of a device's bytes, for many candidates at once.

Every term counts only bytes that `predict.memory` counts at one moment of the step: states, the micro-batches that a
schedule's own order has in flight as a backward begins (`occupancy.py`), gradients that earlier backwards have left, and
the tensors of that backward. Messages and some of what is on its way are left out, so that the sum is never more than the
bytes of `estimate`; a test compares the two. What may fit by the bound is followed event by event (`exact.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np

from shardwise.layout import Layout, UnitPlan, Workload, unit_plan
from shardwise.layout.pipeline import releases_early
from shardwise.layout.units import Backend, Unit
from shardwise.model import ModelConfig
from shardwise.planner.occupancy import FIRST, LAST, MIDDLE, WHOLE, moments
from shardwise.planner.space import BatchChoice, LayoutColumns
from shardwise.predict.memory import peak
from shardwise.predict.memory.activations import Sizes, kept_items, saved_items
from shardwise.predict.memory.block_tensors import BlockTensors
from shardwise.predict.memory.mixtures import BlockElements, alike, block_elements
from shardwise.predict.memory.step import OPTIMIZER_BYTES
from shardwise.report.step_report import DTYPE_BYTES

Num = Any
"""A number, or an array of numbers: rows x shardings x orders of a frame."""

WEIGHT, MASTER = DTYPE_BYTES["bfloat16"], DTYPE_BYTES["float32"]


def places(model: ModelConfig, pp: int, schedule: str = "") -> list[int]:
    """The ranks of a pipeline that can be the fullest under a schedule, "" for any.

    Of ranks between the ends with as many blocks, the first holds most micro-batches; only zb-h1 delays gradients of
    weights the longer, the later a rank is.
    """
    last, (each, rest) = pp - 1, divmod(model.layers, pp)
    found = {0, min(1, last), last}
    if schedule in ("", "zb-h1"):
        found |= {max(0, rest - 1), rest, max(0, last - 1)}
    if model.experts and (dense := model.experts.dense_layers):
        # The first ones that have experts in all of their blocks, without chunks and with the smallest ones.
        found |= {next((p for p in range(pp) if p * each + min(p, rest) >= dense), last), min(dense, last)}
    return sorted(found)


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
    """What a rank with blocks alone reads of a micro-batch."""
    tables: Num
    """Shared by the blocks."""


class MemoryBound:
    """Least bytes of candidates of one model and workload."""

    def __init__(self, model: ModelConfig, workload: Workload, attention: str, backend: Backend) -> None:
        self.model, self.workload, self.attention, self.backend = model, workload, attention, backend
        self._units = cache(self._of_tp)
        self._rows: dict[Any, MicroBatchBytes] = {}

    def total(self, frame: LayoutColumns) -> Num:
        """At least the bytes of each candidate's fullest rank, an array of the frame's shape."""
        few, row = self._distinct(frame)
        schedules = {order.schedule for order in frame.orders}
        ranks = places(self.model, frame.pp, "zb-h1" if "zb-h1" in schedules else "1f1b")
        most = reduce(np.maximum, (self.of_rank(few, place) for place in ranks))
        return np.broadcast_to(most, few.shape)[row]

    def of_rank(self, frame: LayoutColumns, place: int) -> Num:
        """At least the bytes of the rank at one place of each candidate's pipeline."""
        rows = [self._row(frame.tp, row) for row in frame.rows]
        columns = (np.array(column, dtype=float)[:, None, None] for column in zip(*rows, strict=True))
        return RankBound(
            self.model, frame, place, self._units(frame.tp), MicroBatchBytes(*columns), self.backend
        ).total()

    def _distinct(self, frame: LayoutColumns) -> tuple[LayoutColumns, list[int]]:
        """The frame with those rows only that differ in memory, and which of them stands for each row."""
        first: dict[Any, int] = {}
        where = [first.setdefault(self._alike(row), len(first)) for row in frame.rows]
        rows = tuple(frame.rows[where.index(at)] for at in range(len(first)))
        return replace(frame, rows=rows), where

    def _alike(self, row: BatchChoice) -> Any:
        """Equal for rows of the same bytes: without explicit attention or masks they depend on a micro-batch's tokens
        and not on the length of its sequences; but of a single one, pieces are cut without a copy."""
        if self.attention != "sdpa" or self.workload.isolate_documents:
            return row
        return row.sp, row.recompute, row.micro == 1, row.micro * self.workload.seq // row.cp

    def _row(self, tp: int, row: BatchChoice) -> MicroBatchBytes:
        key = tp, self._alike(row)
        if key not in self._rows:
            self._rows[key] = self._micro_batch(tp, *row)
        return self._rows[key]

    def _plan(self, micro_batches: int, **layout: Any) -> UnitPlan:
        made = Layout(attention=self.attention, **layout)
        workload = replace(self.workload, batch=made.micro * micro_batches)
        return unit_plan(self.model.replace(layers=1), made, workload, backend=self.backend)

    def _micro_batch(self, tp: int, cp: int, sp: bool, recompute: str, micro: int) -> MicroBatchBytes:
        plan = self._plan(1, tp=tp, cp=cp, sp=sp, recompute=recompute, micro=micro)
        s, parts = Sizes.of(plan), ["embedding", "blocks.0", "head"]
        embedding, block, head = (sum(saved_items(plan, s, part).values()) for part in parts)
        return MicroBatchBytes(
            embedding,
            block,
            head,
            peak.saved_inputs(plan, s, "embedding"),
            peak.saved_inputs(plan, s, "head"),
            sum(kept_items(plan, s, "embedding").values()),
            sum(kept_items(plan, s, "blocks.0").values()),
            peak.loss(s),
            peak.backwards(plan, s, parts[2:])["backward", "head"] - head,
            *(BlockTensors(plan, s, apart).backward(keeps_gradient=False) for apart in (False, True)),
            *(peak.backwards(plan, s, parts[:1], apart)["backward", "embedding"] for apart in (False, True)),
            s.tokens * 8 * (1 + (self.model.positions != "learned")),
            peak.tables(plan, s),
        )

    def _of_tp(self, tp: int) -> dict[str, Unit]:
        one_block = alike(self.model).replace(layers=1)
        return unit_plan(one_block, Layout(tp=tp), self.workload, backend=self.backend).by_name


@cache
def _early(recompute: str) -> bool:
    """Whether a rank sends gradients of inputs before it computes those of weights."""
    return releases_early(Layout(recompute=recompute))


class RankBound:
    """One rank of every candidate of a frame."""

    def __init__(
        self, model: ModelConfig, frame: LayoutColumns, place: int, units: dict[str, Unit], micro: MicroBatchBytes,
        backend: Backend,
    ) -> None:  # fmt: skip
        self.frame, self.place, self.micro, self.backend = frame, place, micro, backend
        self.layers = frame.layers(place, model.layers)
        self.stage = np.array([s.stage for s in frame.shardings])[:, None]
        # An array in the place of a number: a unit's sizes then are arrays.
        ranks: Any = np.array([s.ranks for s in frame.shardings])[:, None]
        first, last = place == 0, place == frame.pp - 1
        here = {"embedding": first, "tied": first or last, "blocks.0": True, "head": last}
        cut = {name: replace(unit, shard_ranks=ranks) for name, unit in units.items() if here[name]}
        self.padded: dict[str, Num] = {name: unit.padded for name, unit in cut.items()}
        self.shard: dict[str, Num] = {name: unit.shard_numel for name, unit in cut.items()}
        if model.experts or model.latent_attention:
            mean = _mean_block(block_elements(model, frame.tp), frame, place, self.layers)
            self.padded["blocks.0"], self.shard["blocks.0"] = mean
        self.counts = np.array(frame.counts)[:, None, None]
        self.many, self.sharded = self.counts > 1, self.stage >= 2
        self.virtual = np.array([order.virtual for order in frame.orders])
        self.kinds = (
            (WHOLE,) if first and last
            else tuple(kind for kind, there in ((FIRST, first), (LAST, last)) if there)
            + ((MIDDLE,) if max(order.virtual for order in frame.orders) > 1 or not (first or last) else ())
        )  # fmt: skip
        ends = {FIRST: int(first), LAST: int(last), WHOLE: 1, MIDDLE: 0}
        # Bare ends have no blocks, and all other stages one.
        inner = np.maximum(self.virtual - first - last, 1)
        self.blocks = {
            kind: np.where(ends[kind], 0, self.layers / inner) if frame.bare else self.layers / self.virtual
            for kind in self.kinds
        }
        delayed = np.array([order.schedule == "zb-h1" for order in frame.orders])
        early = np.array([_early(row.recompute) for row in frame.rows])[:, None, None]
        self.apart = {
            kind: delayed | (early & (frame.pp > 1) & (kind not in (FIRST, WHOLE))) for kind in self.kinds
        }

    def total(self) -> Num:
        """At least the bytes of this rank."""
        gathered = self.stage == 3
        parameters = np.where(gathered, self._all(self.shard) * MASTER, self._all(self.padded) * WEIGHT)
        optimizer = self._all(self.shard) * (OPTIMIZER_BYTES["bf16"] - np.where(gathered, MASTER, 0))
        return parameters + optimizer + self.micro.inputs * self.counts + self._slots() + self._most()

    def _all(self, sizes: dict[str, Num]) -> Num:
        """Elements of all units of this rank."""
        return sum(size * (self.layers if name == "blocks.0" else 1) for name, size in sizes.items())

    def _slots(self) -> Num:
        """Bytes of the slots of stage 3 without a pipeline: two that units take in turn, and a tied table's own."""
        if self.frame.pp > 1:
            return 0
        edges = [self.padded[name] for name in ("embedding", "head") if name in self.padded]
        outer = reduce(np.maximum, [*edges, self.padded["blocks.0"]] if self.layers > 2 else edges)
        return (self.padded["blocks.0"] + outer + self.padded.get("tied", 0)) * WEIGHT * (self.stage == 3)

    def _sum(self, of: Any, kind: int, names: str = "all") -> Num:
        """Sum over the units of a stage of this kind: its blocks, and what it has besides."""
        ends = {FIRST: ("embedding", "tied"), LAST: ("head", "tied"), WHOLE: ("embedding", "tied", "head"), MIDDLE: ()}
        edge = sum(of(name) for name in ends[kind] if name in self.padded)
        return edge + self.blocks[kind] * of("blocks.0") if names == "all" else edge

    def _accumulated(self, name: str) -> Num:
        """Bytes of a unit's accumulator; several micro-batches are summed in fp32."""
        elements = np.where(self.sharded, self.shard[name], self.padded[name])
        return elements * np.where(self.many, MASTER, WEIGHT)

    def _staged(self, name: str) -> Num:
        """Bytes of a unit's full gradient on its way into the accumulator."""
        if name not in self.padded:
            return 0
        return self.padded[name] * WEIGHT * (self.sharded | self.many)

    def _most(self) -> Num:
        """At least the bytes beyond what lasts through a step."""
        last = self._staged("blocks.0") * self.sharded if FIRST not in self.kinds and WHOLE not in self.kinds else 0
        gradients = sum(np.where(self.sharded, self.shard[name], self.padded[name])
                        * (self.layers if name == "blocks.0" else 1) for name in self.padded)  # fmt: skip
        most = gradients * np.where(self.many, MASTER, WEIGHT) + last
        if self.backend == "nccl":
            most = most + MASTER * reduce(np.maximum, self.shard.values()) * ~self.many
        shared = 0
        if self.frame.pp == 1:
            shared = self.micro.tables - self.micro.known_embedding - self.micro.known_head
        most = most + shared
        for held in self._moments():
            most = np.maximum(most, held)
        return most

    def _moments(self) -> Iterator[Num]:
        s, kinds = self.micro, self.kinds
        saved = {kind: self.blocks[kind] * s.block + self._ends_saved(kind) for kind in kinds}
        kept = {
            kind: self.blocks[kind] * s.kept_block + (s.kept_embedding if kind == FIRST else 0.0) for kind in kinds
        }
        gradients = {kind: self._sum(self._accumulated, kind) for kind in kinds}
        weights = {kind: self._sum(self.padded.__getitem__, kind) * WEIGHT * (self.stage == 3) for kind in kinds}
        inside = {(kind, again): self._inside(kind, again) for kind in kinds for again in (False, True)}
        attending = sum(np.where(self.blocks[kind] > 0, 1, 0) for kind in kinds if kind != MIDDLE)
        attending = np.maximum(attending, self.virtual)
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
            transients = (np.where(there[each] > 0, inside[each, True], inside[each, False]) for each in kinds)
            yield held + _choose(kind, dict(zip(kinds, transients, strict=True)))

    def _ends_saved(self, kind: int) -> Num:
        """Bytes that a stage saves besides its blocks', without inputs of the step."""
        s = self.micro
        embedding = s.embedding - s.known_embedding if kind in (FIRST, WHOLE) else 0.0
        return embedding + (s.head - s.known_head if kind in (LAST, WHOLE) else 0.0)

    def _columns(self) -> Iterator[tuple[list[Num], list[Num], list[Num], list[Num]]]:
        """For each moment, arrays of rows x 1 x orders: its kind and the next, and by kind its counts of saved, kept and
        accumulated."""
        frame = self.frame
        counts, row = np.unique(frame.counts, return_inverse=True)
        table = [[_numbers(order.schedule, frame.pp, m, order.virtual, self.place) if possible else NONE
                  for order, possible in zip(frame.orders, frame.possible[frame.counts.index(m)], strict=True)]
                 for m in counts.tolist()]  # fmt: skip
        most = max(len(each) for of_count in table for each in of_count)
        # [counts, orders, moments, numbers]
        full = np.array([[each + each[:1] * (most - len(each)) for each in of_count] for of_count in table])
        for index in range(most):
            columns = [full[row, :, index, number][:, None, :] for number in range(full.shape[-1])]
            yield columns[:2], columns[2:6], columns[6:10], columns[10:]

    def _inside(self, kind: int, again: bool) -> Num:
        """The most bytes of one backward of a stage beyond what is saved as it begins. again: gradients of an earlier
        micro-batch are there."""
        s, blocks, apart = self.micro, self.blocks[kind], self.apart[kind]
        has_first, has_last = kind in (FIRST, WHOLE), kind in (LAST, WHOLE)
        block, tied = self._staged("blocks.0"), self._staged("tied")
        own = self._staged("head") + tied if has_last else 0.0
        # Full gradients stay until the whole stage is done.
        lasting = (self.sharded & (self.frame.pp > 1)) | (apart & self.many)
        piped = self.frame.pp > 1
        done = 0.0 if again else ~lasting * 1.0
        in_block = np.where(apart, s.in_block_apart, s.in_block)
        head = s.head if has_last else 0.0
        acc = {name: self._accumulated(name) for name in self.padded}
        now = ~(self.many | self.sharded)  # an accumulator comes as its part's backward begins
        edge = (acc["head"] + acc.get("tied", 0.0) * (now | (piped & ~self.sharded))) if has_last else 0.0
        cases = []
        if has_last:
            cases += [s.loss, s.in_head + own + done * now * edge]
            waits = own if not piped else np.where(lasting, own, 0.0)
            if not piped:
                waits = np.where(self.sharded, own, tied)
            begun = in_block - head + block + waits + done * (edge * ~self.sharded + now * acc["blocks.0"])
        else:
            waits, begun = 0.0, in_block + block + done * now * acc["blocks.0"]
        some = blocks > 0
        cases.append(np.where(some, begun, 0.0))
        # The last of its blocks.
        staged = np.where(lasting, blocks * block + (own if has_last else 0.0), block)
        if not piped:
            staged = block * np.where(self.sharded & (blocks > 1), 2, 1) + tied
        so_far = done * (edge + (blocks - np.where(now, 0, np.where(self.sharded, 2, 1))) * acc["blocks.0"])
        kept = apart * (blocks - 1) * s.kept_block
        ending = in_block - (blocks - 1) * s.block - head + kept + staged + np.where(blocks > 1, so_far, 0.0)
        cases.append(np.where(some, ending, 0.0))
        if has_first:
            staged = self._staged("embedding") + tied + np.where(lasting, blocks * block, 0.0)
            if not piped:
                staged = self._staged("embedding") + tied + block * self.sharded
            gone = blocks * s.block + s.embedding + head
            so_far = done * (edge + (blocks - self.sharded) * acc["blocks.0"])
            cases.append(np.where(apart, s.in_embedding_apart, s.in_embedding) - gone + apart * blocks * s.kept_block + staged + so_far)
        return reduce(np.maximum, cases)


def _mean_block(elements: BlockElements, frame: LayoutColumns, place: int, layers: int) -> tuple[Num, Num]:
    """Elements of one of the `layers` blocks of a pipeline's rank, whole and one rank's shard of it: means, arrays of
    shardings x orders. Experts have other ranks to be sharded over."""
    ranks = np.array([sharding.ranks for sharding in frame.shardings])[:, None]
    stage = np.array([sharding.stage for sharding in frame.shardings])[:, None]
    same = np.where(stage > 0, np.maximum(ranks * frame.tp // frame.ep, 1), 1)
    dense = np.array([elements.dense_blocks(frame.pp, order.virtual, place) for order in frame.orders])
    own, experts = elements.routed
    parts = (
        (dense, elements.without, ranks), (layers - dense, own, ranks), (layers - dense, experts // frame.ep, same)
    )  # fmt: skip
    shards = [(count * -(-numel // n), n) for count, numel, n in parts]
    return sum(shard * n for shard, n in shards) / layers, sum(shard for shard, _ in shards) / layers


NONE = [[-1] * 2 + [0] * 12]
"""In place of the moments of a schedule that is not possible."""


@lru_cache(maxsize=4096)
def _numbers(schedule: str, p: int, m: int, v: int, place: int) -> list[list[int]]:
    """The moments of a rank, each as its numbers one after the other."""
    return [[*each[:2], *each.saved, *each.kept, *each.accumulated] for each in moments(schedule, p, m, v, place)]


def _choose(which: Num, of: dict[int, Num]) -> Num:
    """The value of the kind that an array names; 0 for none of them."""
    found: Num = 0.0
    for kind, value in of.items():
        found = np.where(which == kind, value, found)
    return found
