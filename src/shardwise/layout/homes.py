"""Homes of training state: the device, the host's memory, a file of the rank. Free of torch.

Offloaded optimizer state is the last part of every unit's interval: fp32 (fp64) master weights and the optimizer's
moments, updated on the host's cores. On disk each rank has one `StateFile`. Sources: Ren et al. 2021, ZeRO-Offload;
Rajbhandari et al. 2021, ZeRO-Infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from shardwise.records import dataclass
from shardwise.report.step_report import DTYPE_BYTES

if TYPE_CHECKING:
    from shardwise.layout.unit import Unit
    from shardwise.layout.units import UnitPlan

TO_HOST, TO_DEVICE = ("to_host", "host"), ("to_device", "host")
DISK_READ, DISK_WRITE = ("read", "disk"), ("write", "disk")
"""Operation of a copy between homes, and where the ledger has axes: the home beside which it goes."""
PAGE = 4096
"""Bytes at whose multiples direct reads and writes begin and end."""
BUFFERS = 3
"""Loads in memory at a time: one is read, one updated, one written."""
LOAD = 1 << 20
"""Elements of the longest load."""
CHUNK = 1 << 19
"""Elements of offloaded state that are updated at a time."""
ALL = "all"
"""Name of a buffer for the parameters of all units."""
SLOTS = 2
"""States in a file: that of the last step, and that of the step before, which the next update overwrites."""


def offloaded(plan: UnitPlan, unit: Unit) -> int:
    """Elements of a unit's interval, its last ones, whose optimizer state is not on the device."""
    return math.ceil(unit.shard_numel * plan.layout.offload_fraction) if plan.trains and not unit.frozen else 0


def paged(nbytes: int) -> int:
    """So many bytes, filled up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class FileUnit(NamedTuple):
    """Region of one unit in each slot of a `StateFile`."""

    start: int
    """Byte in the slot where its first array begins; the others follow, `stride` bytes apart."""
    stride: int
    elements: int


class Load(NamedTuple):
    """Elements [start, stop) of a unit's offloaded state that are read, updated and written together."""

    unit: str
    start: int
    stop: int


@dataclass(frozen=True)
class StateFile:
    """Layout of one rank's file: a page of header for each slot, the slots, and the parameters that are gathered from
    it. Every array begins at a page."""

    units: tuple[tuple[str, int], ...]
    """(unit, elements of its offloaded state)."""
    parameters: tuple[tuple[str, int], ...]
    """(unit, elements of its interval in compute precision), where parameters are kept there."""
    width: int
    """Bytes of an element of state."""
    parameter_width: int
    """Bytes of an element of a parameter."""
    arrays: int
    """Arrays of state of each unit: master weights and moments."""

    @cached_property
    def regions(self) -> dict[str, FileUnit]:
        """Unit -> its region in a slot."""
        at, regions = 0, {}
        for name, elements in self.units:
            regions[name] = FileUnit(at, paged(elements * self.width), elements)
            at += self.arrays * regions[name].stride
        return regions

    @cached_property
    def slot_bytes(self) -> int:
        return sum(self.arrays * region.stride for region in self.regions.values())

    @cached_property
    def parameter_starts(self) -> dict[str, int]:
        """Unit -> the byte where its parameters begin."""
        at, starts = self.state_bytes, {}
        for name, elements in self.parameters:
            starts[name] = at
            at += paged(elements * self.parameter_width)
        return starts

    @property
    def state_bytes(self) -> int:
        """Bytes of the headers and the slots."""
        return SLOTS * (PAGE + self.slot_bytes)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters, which each step overwrites: they are the master weights rounded."""
        return sum(paged(elements * self.parameter_width) for _, elements in self.parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.state_bytes + self.parameter_bytes

    def start(self, slot: int, unit: str, state: int) -> int:
        """Byte of the file where an array of a slot begins."""
        region = self.regions[unit]
        return SLOTS * PAGE + slot * self.slot_bytes + region.start + state * region.stride

    def loads(self) -> Iterable[Load]:
        for name, elements in self.units:
            for start in range(0, elements, LOAD):
                yield Load(name, start, min(start + LOAD, elements))

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of one of the `BUFFERS` buffers: all arrays of the longest load."""
        longest = max((load.stop - load.start for load in self.loads()), default=0)
        return self.arrays * paged(longest * self.width)


def state_file(plan: UnitPlan) -> StateFile | None:
    """The file of `plan`'s rank; None where nothing is kept on disk."""
    layout = plan.layout
    if not plan.trains or not layout.uses_disk:
        return None
    state = layout.offload_home == "nvme"
    parameters = layout.params_on_disk
    return StateFile(
        tuple((unit.name, offloaded(plan, unit)) for unit in plan.units if state),
        tuple((unit.name, unit.shard_numel) for unit in plan.units if parameters),
        DTYPE_BYTES[plan.dtypes.master],
        DTYPE_BYTES[layout.dtype],
        len(plan.workload.states),
    )


def gradient_chunk(plan: UnitPlan) -> int:
    """Elements of the buffer in which offloaded gradients are converted and clipped."""
    return min(CHUNK, max((offloaded(plan, unit) for unit in plan.units), default=0))


def parameter_buffers(plan: UnitPlan) -> dict[str, int]:
    """Slot -> bytes of the buffer through which parameters come from the file: of the largest interval. Under a
    pipeline, whose stages come as a whole, there is one for all units."""
    buffers: dict[str, int] = {}
    if plan.layout.params_on_disk:
        for unit in plan.units:
            slot = unit.slot if plan.layout.pp == 1 else ALL
            nbytes = paged(unit.shard_numel * DTYPE_BYTES[plan.layout.dtype])
            buffers[slot] = max(buffers.get(slot, 0), nbytes)
    return buffers


def accumulates_on_host(plan: UnitPlan) -> bool:
    """Whether accumulated gradients wait in the host's memory for its cores to update from them."""
    return plan.trains and plan.layout.offload_home != "none" and plan.layout.stage >= 2


def is_master(plan: UnitPlan) -> bool:
    """Whether the engine's own interval holds the master weights of state that stays on the device."""
    return plan.dtypes.interval == plan.dtypes.master and not plan.layout.offloads_params


def on_device(plan: UnitPlan, unit: Unit) -> int:
    """Elements of a unit's interval whose optimizer state stays on the device."""
    return 0 if unit.frozen else unit.shard_numel - offloaded(plan, unit)
