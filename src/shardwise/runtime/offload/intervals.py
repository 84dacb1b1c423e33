"""Intervals of parameters that are kept off the device and come to it when they are gathered."""

from __future__ import annotations

import time
from concurrent.futures import Future

from torch import Tensor

from shardwise.layout.homes import ALL, DISK_READ, TO_DEVICE, parameter_buffers
from shardwise.layout.units import UnitPlan
from shardwise.runtime.offload.file import OffloadFile, pages
from shardwise.runtime.transport.buffers import ByteCounter
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.flat_unit import FlatUnit


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
            comms.copied(DISK_READ, *moved, [reading.result()])
        started = time.perf_counter_ns()
        here = interval.to(flat.whole.device, non_blocking=True)
        comms.copied(TO_DEVICE, *moved, [(started, time.perf_counter_ns())])
        return here

    def _slot(self, flat: FlatUnit) -> str:
        return flat.unit.slot if flat.unit.slot in self.buffers else ALL
