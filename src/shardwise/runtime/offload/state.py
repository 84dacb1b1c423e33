"""Optimizer state of elements of one unit's interval: on the device, in the host's memory, or in the rank's file."""

import time
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from shardwise.layout.homes import ALL, DISK_READ, TO_DEVICE, parameter_buffers
from shardwise.layout.units import UnitPlan
from shardwise.runtime.offload.file import OffloadFile, pages
from shardwise.runtime.transport.buffers import ByteCounter
from shardwise.runtime.transport.comms import Comms, waiting_for_disk
from shardwise.runtime.zero.flat_unit import FlatUnit

MASTER = 0
"""Index of the master weights among `Workload.states`."""


class OptimizerState(Protocol):
    """Master weights and moments of elements [start, stop) of an interval."""

    start: int
    stop: int

    def get(self, state: int, start: int, stop: int) -> Tensor:
        """Elements of the interval of one of `Workload.states`: a view or a copy, which is not to be changed."""

    def put(self, state: int, start: int, values: Tensor) -> None:
        """Change elements of the interval, from `start` on."""


class MemoryState:
    """State in memory. moments: arrays beside the master weights. engines: these are the engine's own interval. own:
    the other tensors."""

    def __init__(self, start: int, master: Tensor, moments: int, engines: bool) -> None:
        self.start, self.stop, self.engines = start, start + len(master), engines
        self.tensors = [master, *(torch.zeros_like(master) for _ in range(moments))]
        self.own = self.tensors[engines:]

    def get(self, state: int, start: int, stop: int) -> Tensor:
        return self.tensors[state][start - self.start : stop - self.start]

    def put(self, state: int, start: int, values: Tensor) -> None:
        self.get(state, start, start + len(values)).copy_(values)


class FileState:
    """State in a file: what it has kept; else no moments yet, and the weights that are given."""

    def __init__(self, file: OffloadFile, unit: str, start: int, master: Tensor) -> None:
        self._file, self._unit = file, unit
        self.start, self.stop = start, start + len(master)
        if not file.kept:
            file.put(unit, MASTER, 0, master)

    def get(self, state: int, start: int, stop: int) -> Tensor:
        return self._file.get(self._unit, state, start - self.start, stop - self.start)

    def put(self, state: int, start: int, values: Tensor) -> None:
        self._file.put(self._unit, state, start - self.start, values)


class StoredIntervals:
    """The rank's intervals in the host's memory or in `file`, which is read ahead of gathers. host: counts its buffers.

    Each slot of gathered weights has a buffer of what is read for it; under a pipeline there is one for all, whose
    gather must be over before the next is read.
    """

    def __init__(self, plan: UnitPlan, file: OffloadFile | None, host: ByteCounter) -> None:
        self._file = file if plan.layout.params_on_disk else None
        self.buffers = {slot: pages(nbytes) for slot, nbytes in parameter_buffers(plan).items()}
        self._coming: dict[str, tuple[str, Future[tuple[int, int]], Tensor]] = {}
        """Slot -> the unit that its buffer is read for."""
        for buffer in self.buffers.values():
            host.add("comm", buffer.nbytes)

    def prefetch(self, flat: FlatUnit) -> None:
        """Start to read a unit's interval, unless that is under way. The gather before it in its slot must be over."""
        slot = self._slot(flat)
        if self._file is not None and self._coming.get(slot, ("",))[0] != flat.unit.name:
            name = flat.unit.name
            if slot in self._coming:  # of a use that a pass outside of the plan came before
                self._coming.pop(slot)[1].result()
            self._coming[slot] = name, *self._file.start_reading(name, self.buffers[slot])

    def fetch(self, flat: FlatUnit, comms: Comms) -> Tensor:
        """A unit's interval, on the device, until the next one of its slot is fetched. comms: has the ledger."""
        interval, moved = flat.interval, (flat.unit.name, flat.whole.dtype, flat.unit.shard_numel)
        if self._file is not None:
            self.prefetch(flat)
            _, reading, interval = self._coming.pop(self._slot(flat))
            with waiting_for_disk(comms):
                span = reading.result()
            comms.copied(DISK_READ, *moved, [span])
        started = time.perf_counter_ns()
        here = interval.to(flat.whole.device, non_blocking=True)
        comms.copied(TO_DEVICE, *moved, [(started, time.perf_counter_ns())])
        return here

    def _slot(self, flat: FlatUnit) -> str:
        return flat.unit.slot if flat.unit.slot in self.buffers else ALL
