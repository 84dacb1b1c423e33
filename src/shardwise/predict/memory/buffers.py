"""The engine's buffers over a step, in bytes: accumulators and full gradients on their way to them.

An accumulator comes with the first gradient of its unit and stays until the optimizer has read it. A full gradient that
is staged, and the scratch of a reduce-scatter, stay until the next unit's gradients are complete, whose reduction waits
for the one before: so communication runs behind one part's backward, and nothing is held for longer. Where ranks read
each other's staged gradients in place, that memory is there all the time, and an accumulator comes with the start of
its unit's reduction.
"""

from collections.abc import Iterator
from typing import Literal

from shardwise.layout.axes import HPZ, SHARD
from shardwise.layout.gradients import finished_after, packed_gradients, trained_units
from shardwise.layout.homes import accumulates_on_host
from shardwise.layout.transport_buffers import transport_buffers
from shardwise.layout.unit import Unit, device_of
from shardwise.layout.units import UnitPlan
from shardwise.layout.wire import adding_bytes, packing_bytes
from shardwise.ops.limits import sum_chunk
from shardwise.records import dataclass
from shardwise.report.step_report import DTYPE_BYTES

When = Literal["loss", "begin", "backward", "reduction", "between", "landing", "optimizer", "outer"]
"""At the end of a forward pass; before a part's backward; in it; after it, as the reduction before its own ends; until
the next block's, where a root computes around blocks; at the end; in an outer step, when gradients are gone."""


@dataclass(frozen=True)
class MemoryByClass:
    """Bytes at one moment.

    part: whose backward it is, or was just now. comm: without the slots of weights, but with the stages that a pipeline
    has gathered. arriving: the sum that a reduction hands over, where that is not in its scratch. adds: whether the
    gradients of the part's weights are added to those of an earlier micro-batch.
    """

    when: When
    part: str
    gradients: int
    comm: int
    arriving: int = 0
    adds: bool = False

    @property
    def total(self) -> int:
        return self.gradients + self.comm + self.arriving


class MemoryTrace:
    """The state of the buffers while the backwards of a step are followed, as the engine goes through them."""

    def __init__(self, plan: UnitPlan) -> None:
        self.plan, self.stage = plan, plan.layout.stage
        self.on_host = accumulates_on_host(plan)
        self.accumulators: set[str] = set()
        """Units that have one; their bytes are `accumulated`."""
        self.accumulated = 0
        self.staged: dict[str, int] = {}
        self.flying: Unit | None = None
        self.written: set[str] = set()
        """Units to whose gradients products of weights have been added."""
        self.buffers = transport_buffers(plan)
        self.lasting = self.buffers.lasting * sum(self.buffers.sizes.values()) * DTYPE_BYTES[self.buffers.dtype]

    def now(self, when: When, part: str = "", arriving: int = 0, adds: bool = False) -> MemoryByClass:
        scratch = self.buffers.room(self.plan, self.flying) if self.flying else 0
        comm = sum(self.staged.values()) + scratch + self.lasting
        return MemoryByClass(when, part, self.accumulated, comm, arriving, adds)

    def write(self, part: str) -> bool:
        """The gradients of `part`'s weights are computed; whether they are added to those of an earlier micro-batch."""
        names = {unit.name for unit in trained_units(self.plan, part)}
        adds = names <= self.written
        if not self.lasting:
            self.written |= names
        return adds

    def accumulate(self, unit: Unit) -> None:
        if self.on_host or unit.name in self.accumulators:
            return
        self.accumulators.add(unit.name)
        elements = unit.shard_numel if self.stage >= 2 else unit.padded
        self.accumulated += elements * DTYPE_BYTES[self.plan.dtypes.gradients]

    def put(self, unit: Unit) -> None:
        """Its full gradient is staged."""
        self.staged[unit.name] = unit.padded * DTYPE_BYTES[self.buffers.dtype]

    def begin(self, part: str) -> Iterator[MemoryByClass]:
        """The engine makes room for the gradients of `part`."""
        for unit in trained_units(self.plan, part):
            if not self.plan.dtypes.stages_gradients:
                self.accumulate(unit)
                continue
            staged = self.buffers.staged
            if self.flying and staged.get(self.flying.name) == staged[unit.name]:
                yield from self.land("begin", part)
            if not self.lasting:
                self.put(unit)

    def compute(self, part: str) -> Iterator[MemoryByClass]:
        """The backward pass of `part`."""
        yield from self.begin(part)
        yield self.now("backward", part, adds=self.write(part))

    def finish(self, part: str, last: bool) -> Iterator[MemoryByClass]:
        """It is over. last: in the last micro-batch."""
        yield from self.collect(part)
        if self.stage >= 2 or last:
            yield from self.reduce(part)

    def collect(self, part: str) -> Iterator[MemoryByClass]:
        """Below stage 2, what has been staged goes to the accumulators."""
        for unit in finished_after(self.plan, part) if self.stage < 2 and self.plan.dtypes.stages_gradients else ():
            self.accumulate(unit)
            yield self.now("reduction", part)
            del self.staged[unit.name]
            self.written.discard(unit.name)

    def reduce(self, part: str) -> Iterator[MemoryByClass]:
        """The gradients of `part` start on their way."""
        for unit in finished_after(self.plan, part) if self.stage else ():
            if self.lasting:
                self.accumulate(unit)
            yield from self.land("reduction", part)
            self.flying = unit
            if unit.shard_ranks == 1:  # experts that no other rank has
                yield from self.land("reduction", part)
            else:
                packs = packed_gradients(self.plan, unit) > 0
                packing = packing_bytes(unit.longest_run, device_of(self.plan.backend)) if packs else 0
                yield self.now("reduction", part, packing)

    def land(self, when: When, part: str = "") -> Iterator[MemoryByClass]:
        """The reduction under way ends."""
        if self.flying is None:
            return
        if self.stage >= 2:
            self.accumulate(self.flying)
        yield self.now(when, part, added_up(self.flying, self.plan))
        if self.staged.pop(self.flying.name, None):
            self.written.discard(self.flying.name)
        self.flying = None


def added_up(unit: Unit, plan: UnitPlan) -> int:
    """Bytes of the chunks in fp32 through which the sum of a unit's gradients over the data ranks arrives."""
    if packed_gradients(plan, unit):
        return adding_bytes(unit.longest_run, unit.reduce[0].axes == HPZ, device_of(plan.backend))
    if plan.cuda or plan.schedules.of("reduce_scatter", SHARD):
        return 0
    return wide_chunk(unit.shard_numel, plan.dtypes.gradients, plan.layout.shard_ranks)


def wide_chunk(elements: int, dtype: str, pieces: int) -> int:
    """Bytes of it for so many pieces, of which two take one addition in bf16."""
    return sum_chunk(elements) * DTYPE_BYTES["float32"] if dtype == "bfloat16" and pieces > 2 else 0


def held_through_step(plan: UnitPlan) -> Iterator[MemoryByClass]:
    """The buffers at every moment of a step at which they grow, in order.

    The first micro-batch finds nothing, and the second one no accumulator for what is still on its way; from the third
    on all find the same, so at most three are followed.
    """
    walk, count = MemoryTrace(plan), min(plan.micro_batches, 3)
    for index in range(count):
        yield walk.now("loss")
        last, around = index == count - 1, plan.of_kind("root")
        for part in around:
            yield from walk.compute(part)
        for part in reversed([part for part in plan.parts if part not in around]):
            yield from walk.compute(part)
            yield from walk.finish(part, last)
            if around:
                yield walk.now("between", part)
        for part in around:
            yield from walk.finish(part, last)
    yield from walk.land("landing")
    yield walk.now("optimizer")
    if plan.layout.local_sgd:
        walk.accumulated = 0
        yield walk.now("outer")
