"""Optimizer state of elements of one unit's interval: on the device, in the host's memory, or in the rank's file."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shardwise.runtime.offload.file import OffloadFile

MASTER = 0
"""Index of the master weights among `UnitPlan.states`."""


class OptimizerState(Protocol):
    """Master weights and moments of elements [start, stop) of an interval."""

    start: int
    stop: int

    def get(self, state: int, start: int, stop: int) -> Tensor:
        """Elements of the interval of one of `UnitPlan.states`: a view or a copy, which is not to be changed."""

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
