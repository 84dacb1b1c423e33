"""Units: flat buffers of parameters that are gathered, reduced and freed together, and the collectives of each."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

from shardwise.layout.axes import Axes
from shardwise.layout.placement import Placed
from shardwise.layout.wire import PackedRun, packed_runs
from shardwise.records import dataclass

Backend = Literal["gloo", "nccl", "shared", "staged"]
"""Backend of the collectives: gloo, NCCL, the memory that processes of one host share, or, between ranks that share a
GPU, one of CPU ranks with copies to the host and back."""

WEIGHT_BITS, GRADIENT_BITS = 8, 4
"""Bits of a weight under qwz, and of a gradient under qgz."""


def device_of(backend: Backend) -> Literal["cpu", "cuda"]:
    """Kind of the devices between which a backend communicates."""
    return "cuda" if backend in ("nccl", "staged") else "cpu"


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a unit's flat buffer with the same treatment."""

    start: int
    stop: int
    replicas: int
    """Ranks of the norm's group that hold the same values."""
    decay: bool
    sum_over: Axes
    """Axes over which each rank has its part of the gradient, beside those of `Unit.reduce`."""

    def within(self, start: int, stop: int) -> Span | None:
        """The part of this span inside [start, stop), relative to `start`; None when they do not meet."""
        a, b = max(self.start, start), min(self.stop, stop)
        return replace(self, start=a - start, stop=b - start) if a < b else None


class Gather(NamedTuple):
    """The gather of a unit's parameters."""

    unit: str
    axes: Axes
    """The axes over which the gathered shards are cut: they say which shard is the source."""
    dtype: str
    """dtype on the wire."""


class Hop(NamedTuple):
    """One collective on the way of a unit's gradients to their sum over the data ranks."""

    op: Literal["reduce_scatter", "all_to_all", "all_reduce"]
    """By an all-to-all ranks exchange packed pieces, which each of them adds up (ZeRO++'s qgZ)."""
    axes: Axes
    dtype: str
    """dtype on the wire."""
    times: int
    """Times per step: once, or once per micro-batch."""


@dataclass(frozen=True)
class Unit:
    """One flat buffer: `name` is the part it holds, or "tied" for the tied embedding."""

    name: str
    placed: tuple[Placed, ...]
    """Its parameters in flat order."""
    slot: str
    """Its buffer at stage 3: "outer", "inner", "tied"; a root, and every unit under a pipeline, has one of its own."""
    shard_ranks: int
    sharded_over: Axes
    """Axes over which optimizer state, and by stage gradients and parameters, are cut into intervals."""
    replicate: Axes
    """Axes along which ranks hold the same interval."""
    again: Axes
    """Axes of the gathers that follow the first one of a step: over `sharded_over`, or over ranks that have kept a
    second copy of what the first one gave (ZeRO++'s hpZ)."""
    copy_ranks: int
    """Ranks over which the second copy is cut; 0 without one."""
    reduce: tuple[Hop, ...]
    """From the full gradients of one rank to the sum of its interval; none without a training step."""
    copies: int = 1
    """Ranks of the norm's group, beside tensor-parallel ones, that hold the same interval."""
    frozen: bool = False
    """Whether its parameters stay as they are."""
    dtype: str = ""
    """dtype of its parameters where that is not the layout's."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each parameter in the flat buffer."""
        starts, at = [], 0
        for p in self.placed:
            starts.append(at)
            at += p.numel
        return tuple(starts)

    @cached_property
    def numel(self) -> int:
        return sum(p.numel for p in self.placed)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's interval, padding included."""
        return -(-self.numel // self.shard_ranks)

    @property
    def padded(self) -> int:
        return self.shard_numel * self.shard_ranks

    @property
    def copy_numel(self) -> int:
        """Elements that one rank keeps of the second copy."""
        return self.padded // self.copy_ranks if self.copy_ranks else 0

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The flat buffer cut where its treatment changes."""
        spans: list[Span] = []
        for start, p in zip(self.offsets, self.placed, strict=True):
            span = Span(start, start + p.numel, p.replicas * self.copies, p.parameter.decay, p.sum_over)
            if spans and replace(span, start=spans[-1].start, stop=spans[-1].stop) == spans[-1]:
                span = replace(span, start=spans.pop().start)
            spans.append(span)
        return tuple(spans)

    @cached_property
    def block_cuts(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Runs [start, stop) of each shard rank's interval that are split, or replicated, over as many tp ranks: packed
        elements of two runs share no block. Padding belongs to the last one."""
        neighbors = zip(self.offsets[1:], pairwise(self.placed), strict=True)
        ends = [start for start, (before, after) in neighbors if before.replicas != after.replicas]
        cuts = []
        for first in range(0, self.padded, self.shard_numel):
            inside = [end - first for end in ends if first < end < first + self.shard_numel]
            cuts.append(tuple(pairwise([0, *inside, self.shard_numel])))
        return tuple(cuts)

    @cached_property
    def longest_run(self) -> int:
        """Elements of the longest run of any interval."""
        return max(stop - start for runs in self.block_cuts for start, stop in runs)

    def packed_runs(self, place: int, bits: int) -> tuple[PackedRun, ...]:
        return packed_runs(self.block_cuts[place], bits)

    def packed_bytes(self, bits: int) -> int:
        """Bytes of a packed interval: the most of any shard rank, since all send equal parts."""
        return max(packed_runs(cuts, bits)[-1].packed.stop for cuts in set(self.block_cuts))

    @cached_property
    def partial_sums(self) -> tuple[tuple[int, int, Axes], ...]:
        """(start, stop, axes) of gradients that are partial on each rank along `axes`."""
        if self.frozen:
            return ()
        runs = ((axes, list(run)) for axes, run in groupby(self.spans, lambda span: span.sum_over) if axes)
        return tuple((run[0].start, run[-1].stop, axes) for axes, run in runs)


def experts_of(part: str) -> str:
    return f"{part}.experts"


def frozen_of(name: str) -> str:
    return f"{name}.frozen"


def narrow_of(name: str) -> str:
    """Name of the unit of frozen matrices in fewer bits, beside the unit of this name."""
    return f"{name}.narrow"
