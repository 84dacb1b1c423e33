"""The worst moment of a step, for arrays of candidates: what gradients, buffers and activations take together.

Blocks are alike, so that of all moments only the first, the second and the last block's backward can be the worst (in
between, everything is linear in the number of blocks that are done). `predict.memory.peak` and `predict.memory.buffers`
follow a step moment by moment instead. Pipelines are in `pipelined.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np

from shardwise.layout.units import Unit
from shardwise.model import ModelConfig
from shardwise.planner.mixed import Mixed
from shardwise.planner.space import LayoutColumns
from shardwise.predict.memory.step import OPTIMIZER_BYTES
from shardwise.report.step_report import DTYPE_BYTES

Num = Any
"""A number, or an array of numbers: rows x shardings x orders of a frame."""

WEIGHT, MASTER = DTYPE_BYTES["bfloat16"], DTYPE_BYTES["float32"]


class Saved(NamedTuple):
    """Bytes of one micro-batch, arrays over rows.

    embedding, block, head: saved by each part; kept_: from the gradient of its input to that of its weights, where a
    schedule computes these apart; known_: what of the saved are inputs of the step. loss, in_head, in_block,
    in_embedding: besides what is saved, while the loss is computed and in each part's backward (`_apart` where weights'
    gradients are put off). after_block, after_edge: as a reduction ends after a part. inputs: what the batch brings.
    tables: what blocks share. message: the residual stream.
    """

    embedding: Num
    block: Num
    head: Num
    kept_embedding: Num
    kept_block: Num
    kept_head: Num
    known_embedding: Num
    known_head: Num
    loss: Num
    in_head: Num
    in_block: Num
    in_block_apart: Num
    in_embedding: Num
    after_block: Num
    after_edge: Num
    inputs: Num
    tables: Num
    message: Num


class TransientBytes(NamedTuple):
    """Bytes beyond what lasts through a step, and of them full gradients and gathered weights."""

    beyond: Num
    comm: Num


class Rank(ABC):
    """One rank of every candidate of a frame: which units it has, and what its gradients take."""

    embedding = head = True

    def __init__(
        self,
        model: ModelConfig,
        frame: LayoutColumns,
        place: int,
        units: dict[str, Unit],
        saved: Saved,
        mixed: Mixed | None = None,
    ) -> None:
        self.model, self.frame, self.place, self.units, self.saved = model, frame, place, units, saved
        self.alike = mixed is None
        self.layers = frame.layers(place, model.layers)
        self.stage = np.array([s.stage for s in frame.shardings])[:, None]
        # An array in the place of a number: a unit's sizes then are arrays.
        ranks: Any = np.array([s.ranks for s in frame.shardings])[:, None]
        here = {"embedding": self.embedding, "tied": self.embedding or self.head, "blocks.0": True, "head": self.head}
        cut = {name: replace(unit, shard_ranks=ranks) for name, unit in units.items() if here[name]}
        self.padded: dict[str, Num] = {name: unit.padded for name, unit in cut.items()}
        self.shard: dict[str, Num] = {name: unit.shard_numel for name, unit in cut.items()}
        if mixed is not None:
            # The mean of this rank's blocks; experts have other ranks to be sharded over.
            self.padded["blocks.0"], self.shard["blocks.0"] = mixed.held(frame, self.place, self.layers)
        self.counts = np.array(frame.counts)[:, None, None]
        self.many = self.counts > 1

    @cached_property
    def sharded(self) -> Num:
        """Whether gradients are kept in shards."""
        return self.stage >= 2

    @cached_property
    def grad_bytes(self) -> Num:
        """Bytes of an accumulated gradient: several micro-batches are summed in fp32."""
        return np.where(self.many, MASTER, WEIGHT)

    def all(self, sizes: dict[str, Num]) -> Num:
        """Elements of all units of this rank."""
        return sum(size * (self.layers if name == "blocks.0" else 1) for name, size in sizes.items())

    def accumulated(self, *names: str) -> Num:
        """Bytes of units' accumulators, of those that this rank has."""
        kept: Iterator[Num] = (
            np.where(self.sharded, self.shard[name], self.padded[name]) for name in names if name in self.padded
        )
        return sum(kept) * self.grad_bytes

    def staged(self, *names: str) -> Num:
        """Bytes of units' full gradients on their way into the accumulators."""
        return sum(self.padded[name] for name in names if name in self.padded) * WEIGHT * (self.sharded | self.many)

    @cached_property
    def gradients(self) -> Num:
        """Bytes of all accumulators."""
        return np.where(self.sharded, self.all(self.shard), self.all(self.padded)) * self.grad_bytes

    @cached_property
    def widened(self) -> Num:
        """Bytes of the largest unit's gradients in fp32, which the optimizer makes of bf16 ones."""
        largest = reduce(np.maximum, self.shard.values())
        return MASTER * largest * ~self.many

    def held(self) -> tuple[Num, ...]:
        """Parameters, gradients, optimizer, saved, comm, total: bytes of this rank."""
        gathered = self.stage == 3
        parameters = np.where(gathered, self.all(self.shard) * MASTER, self.all(self.padded) * WEIGHT)
        optimizer = self.all(self.shard) * (OPTIMIZER_BYTES["bf16"] - np.where(gathered, MASTER, 0))
        beyond, comm = self._most()
        weights = self.weights * WEIGHT * gathered
        lasting = parameters + optimizer + weights + self.saved.inputs * self.counts
        return (
            parameters,
            self.gradients,
            optimizer,
            self.activations(),
            weights + comm,
            lasting + beyond,
        )

    def _most(self) -> TransientBytes:
        """The most bytes at all moments. Those before the optimizer are computed once for shardings whose gradients
        take as much."""
        first: dict[Any, int] = {}
        which = [first.setdefault(self._gradients_of(at), len(first)) for at in range(len(self.frame.shardings))]
        if self.alike and len(first) < len(which):
            kept = tuple(self.frame.shardings[which.index(at)] for at in range(len(first)))
            few = type(self)(self.model, replace(self.frame, shardings=kept), self.place, self.units, self.saved)
            before = [np.take(most, which, axis=1) if most.shape[1] > 1 else most for most in _most(few.moments())]
            return _most([TransientBytes(*before), *self.optimizer()])
        return _most([*self.moments(), *self.optimizer()])

    def _gradients_of(self, sharding: int) -> Any:
        """The sizes from which the bytes of gradients follow; shards of whole ones are the optimizer's alone."""
        sharded = bool(self.sharded[sharding, 0])
        sizes = [*self.padded.values(), *(self.shard.values() if sharded else ())]
        return (sharded, *(int(size[sharding, 0]) for size in sizes)) if self.alike else sharding

    @property
    @abstractmethod
    def weights(self) -> Num:
        """Elements of gathered weights at a time, at stage 3."""

    @abstractmethod
    def activations(self) -> Num:
        """The most bytes saved for backward at a time."""

    @abstractmethod
    def moments(self) -> Iterator[TransientBytes]:
        """What can be the worst moments of a step, but for the optimizer's."""

    @abstractmethod
    def optimizer(self) -> Iterator[TransientBytes]:
        """What can be the worst moments of the optimizer."""


def _most(moments: Iterable[TransientBytes]) -> TransientBytes:
    beyond, comm = zip(*moments, strict=True)
    return TransientBytes(reduce(np.maximum, beyond), reduce(np.maximum, comm))


class Alone(Rank):
    """A rank without a pipeline. Units are reduced one by one, each behind the backward of the next."""

    @property
    def weights(self) -> Num:
        """Two slots that units take in turn, and a tied table's own."""
        edges = [self.padded[name] for name in ("embedding", "head") if name in self.padded]
        outer = np.maximum.reduce([*edges, self.padded["blocks.0"]] if self.layers > 2 else edges)
        return self.padded["blocks.0"] + outer + self.padded.get("tied", 0)

    def activations(self) -> Num:
        s = self.saved
        return s.embedding + self.layers * s.block + s.head

    def moments(self) -> Iterator[TransientBytes]:
        """A second micro-batch finds all accumulators there; one alone finds those of parts already done. Shards of a
        unit's gradients come when the next unit's are complete; until then its full ones stay."""
        s = self.saved
        tied, final = self.staged("tied"), self._final
        left = self.staged(final) * self.sharded
        shared = s.tables - s.known_embedding - s.known_head
        everything = self.activations() + shared
        edge = self.accumulated("head", "tied")
        # What the first micro-batch left under way is accumulated when it has landed.
        under_way = self._there(0.0) - self.accumulated(final) * self.sharded * (self.counts == 2)
        yield TransientBytes(everything + s.loss + under_way + left * self.many, left * self.many)
        # A tied table's full gradient waits from the head's backward for the embedding's, and lands before.
        own = self.staged("head") + tied + left * self.many * (final != "tied")
        before = self._there(0.0) if final == "tied" else under_way
        yield TransientBytes(everything + s.in_head + np.where(self.many | self.sharded, before, edge) + own, own)
        landed = everything - s.head + s.after_edge + np.where(self.many | self.sharded, self._there(0.0), edge)
        yield TransientBytes(landed + own, own)
        for beyond, comm in self._blocks():
            yield TransientBytes(beyond + shared + tied, comm + tied)
        own = self.staged("embedding", "tied") + self.staged("blocks.0") * self.sharded
        done = self.gradients - np.where(self.sharded, self.accumulated("embedding", "tied"), 0.0)
        so_far = done - np.where(self.sharded, self.accumulated("blocks.0"), 0.0)
        yield TransientBytes(s.in_embedding + shared + self._there(so_far) + own, own)
        yield TransientBytes(s.after_edge + shared + self._there(done) + own, own)

    def optimizer(self) -> Iterator[TransientBytes]:
        s, left = self.saved, self.staged(self._final) * self.sharded
        shared = s.tables - s.known_embedding - s.known_head
        yield TransientBytes(self.gradients + left + self.widened + shared, left)

    @property
    def _final(self) -> str:
        """The unit whose gradients come last."""
        return "tied" if "tied" in self.padded else "embedding"

    def _there(self, done: Num) -> Num:
        return np.where(self.many, self.gradients, done)

    def _blocks(self) -> Iterator[TransientBytes]:
        """The moments of the first, the second and the last block whose backward runs."""
        s, block, each = self.saved, self.staged("blocks.0"), self.accumulated("blocks.0")
        head, tied = self.accumulated("head"), np.where(self.sharded, 0.0, self.accumulated("tied"))
        for j in sorted({1, min(2, self.layers), self.layers}):
            previous = (self.staged("head") if j == 1 else block) * self.sharded
            # In shards, what is complete is accumulated one unit later.
            late = np.where(self.sharded, (head + (j - 2) * each) * (j > 1), head + tied + j * each)
            after = np.where(self.sharded, head + (j - 1) * each, head + tied + j * each)
            below = s.embedding + (self.layers - j) * s.block
            yield TransientBytes(below + s.block + s.in_block + self._there(late) + block + previous, block + previous)
            yield TransientBytes(below + s.after_block + self._there(after) + block + previous, block + previous)
