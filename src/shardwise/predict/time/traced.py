"""Seconds of a traced module's operations: products, attention and passes over memory, as of any other model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardwise.arrays import Num
from shardwise.layout import Mesh
from shardwise.layout.axes import CP, EP, TP, Axes, named
from shardwise.layout.homes import TO_HOST
from shardwise.layout.layout import cut_layout
from shardwise.model.blueprint import Blueprint
from shardwise.predict.time.kernels import Kernels
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.traced_layout import traced
from shardwise.records import dataclass
from shardwise.report.step_report import DTYPE_BYTES

if TYPE_CHECKING:
    from shardwise.model.trace import Trace, TracedCollective, TracedOp, TracedStep

PRECISION = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class TracedSeconds:
    """One part's seconds for a micro-batch. forward, backward: by kind of computation, and "tensor" and "host"."""

    forward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    backward: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, other: TracedSeconds, times: float) -> None:
        """Add another part's, weighted."""
        for mine, theirs in ((self.forward, other.forward), (self.backward, other.backward)):
            for kind, seconds in theirs.items():
                mine[kind] += times * seconds


KINDS = ("matmul", "attention", "memory", "tensor", "experts", "host")


@dataclass(frozen=True)
class TracedTimes:
    """Seconds of a module's parts on one cluster. hidden: share of collectives behind backward's products; beside: of
    messages that go around a ring behind its attention."""

    model: Blueprint
    pricing: Pricing
    dtype: str
    hidden: float
    beside: float

    @cached_property
    def trace(self) -> Trace:
        """What was traced."""
        return traced(self.model)

    def of(self, tp: int, micro: int, sp: bool, cut: str) -> tuple[TracedSeconds, TracedSeconds, TracedSeconds]:
        """(a block, the mean of all; what the root computes before the blocks; and behind them) for a micro-batch of
        `micro` rows. cut: as of `traced_cut`."""
        trace = self.trace.on_shards if sp else self.trace
        step = trace.step(tp, PRECISION.get(self.dtype, "bf16"), "none", cut)
        block, blocks = TracedSeconds(), {p.name for p in self.model.of_kind("block")}
        ends = {"entry": TracedSeconds(), "exit": TracedSeconds()}
        for equal in step.operations:
            inside = [part for part in equal.parts if part in blocks]
            if inside:
                block.add(self._computed(equal.operations, micro), len(inside) / self.model.layers)
            for end, seconds in ends.items() if len(inside) < len(equal.parts) else ():
                seconds.add(self._computed([op for op in equal.operations if op.end == end], micro), 1)
        self._communicated(step, micro, block, ends, blocks)
        return block, ends["entry"], ends["exit"]

    def _computed(self, operations: Iterable[TracedOp], micro: int) -> TracedSeconds:
        result, launch = TracedSeconds(), self.pricing.constants.value("launch_s")
        for op in operations:
            into = result.forward if op.phase == "forward" else result.backward
            kind = {"product": "matmul", "attention": "attention", "pass": "memory"}[op.kind]
            into[kind] += op.count * float(self._seconds(op, micro))
            into["host"] += op.count * launch
        return result

    def _seconds(self, op: TracedOp, micro: int) -> Num:
        kernels: Kernels = self.pricing.kernels
        sizes = [max(1, self.trace.at(pair, micro)) for pair in op.sizes]
        if op.kind == "product":
            batch, m, n, k = sizes
            return kernels.matmul(m, n, k, self.dtype, batch)
        if op.kind == "attention":
            batch, queries, keys, heads, kv_heads, width, _ = sizes
            causal = op.sizes[-1] == (1, 1)
            seconds = kernels.attention(batch, queries, keys, heads, kv_heads, width, causal, self.dtype)
            return seconds * kernels.attention_ratio(width, keys, self.dtype) if op.phase == "backward" else seconds
        moved = kernels.pass_over(self.trace.at(op.nbytes, micro))
        return max(moved, self.trace.at(op.flops, micro) / self.pricing.constants.peak(self.dtype))

    def _communicated(
        self, step: TracedStep, micro: int, block: TracedSeconds, ends: dict[str, TracedSeconds], blocks: set[str]
    ) -> None:
        """Add collectives over ranks that are not data-parallel ones. Backward's over tensor-parallel ranks run behind
        products in part, and what goes around a ring behind attention to one of its cp pieces."""
        mesh = Mesh(cut_layout(step.cut, tp=step.tp))
        rings = {"forward": 0.0, "backward": 0.0}
        for row in (row for row in step.collectives if row.group != TO_HOST[1]):
            axes, inside = named(row.group) or TP, row.unit in blocks
            seconds = row.count * self._exchange(row, axes, mesh, micro) / (self.model.layers if inside else 1)
            if row.op in ("send", "recv"):
                rings[row.phase] += seconds
                continue
            of = block if inside else ends[row.end or "exit"]
            into, left = (of.forward, 1.0) if row.phase == "forward" else (of.backward, 1 - self.hidden * (axes == TP))
            into["experts" if axes == EP else "tensor"] += seconds * left
        for phase, into in (("forward", block.forward), ("backward", block.backward)):
            covered = into["attention"] * (1 - 1 / mesh.size(CP))
            into["tensor"] += rings[phase] - self.beside * min(rings[phase], covered)

    def _exchange(self, row: TracedCollective, axes: Axes, mesh: Mesh, micro: int) -> float:
        """Seconds of one of them. A message comes while the rank's own one goes."""
        nbytes = self.trace.at(row.elements, micro) * DTYPE_BYTES[row.dtype]
        ranks, apart = mesh.size(axes), mesh.size(TP) if axes == CP else 1
        if row.op == "recv":
            return 0.0
        if row.op == "send":
            return float(self.pricing.collectives.hop(nbytes, apart, ranks))
        return float(self.pricing.collectives.seconds(row.op, nbytes, ranks, apart))


def handed_elements(model: Blueprint, micro: Num) -> Num:
    """Elements of the largest tensor between two parts, for a micro-batch of `micro` rows, over all ranks that share
    their tokens; 0 where parts are in no known order."""
    trace = traced(model)
    step = next((step for step in trace.steps if step.stages), None)
    if step is None or step.stages is None:
        return 0.0 * np.asarray(micro)
    pairs, pieces = [message.elements for message in step.stages.messages], step.pieces
    return np.vectorize(lambda rows: float(pieces * max((trace.at(pair, rows) for pair in pairs), default=0)))(micro)
