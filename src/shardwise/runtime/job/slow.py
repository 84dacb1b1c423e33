"""Waiting that `--slow` and `--emulate` inject into the steps of one rank, and the rank's training time.

The arithmetic of a step is its forward and backward passes. Without `--emulate` a step of factor f waits at its
beginning for f - 1 times what the arithmetic of the step before has taken. With `--emulate TIME` the arithmetic lasts
f x TIME in all: it is done, and the rest of the time is slept, so that ranks which share few cores run as if each had
its own. What is computed does not change.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.report.waiting import RankWaiting
from shardwise.runtime.job.pulse import Pulse
from shardwise.schedule.stragglers import Stragglers

SLICE = 0.1
"""Seconds between two heartbeats while a rank waits on purpose."""


class InjectedWaiting:
    """The injected waiting of one rank. emulated: seconds of `--emulate`."""

    def __init__(self, slow: Stragglers, emulated: float | None, rank: int, device: torch.device, pulse: Pulse) -> None:
        self._slow, self._emulated, self._rank, self._device, self._pulse = slow, emulated, rank, device, pulse
        self.active = bool(slow.slow) or emulated is not None
        self.seconds = 0.0
        """Injected so far."""
        self.exceeded, self.longest = 0, 0.0
        """Steps whose arithmetic took longer than was emulated, and the most that it took, in seconds."""
        self.spans: list[tuple[int, int]] = []
        """Nanoseconds of the monotonic clock from and to which it waited in this step."""
        self._factor = 1.0
        self._arithmetic = 0.0
        """Seconds of the last step's."""

    def event(self) -> dict[str, float]:
        """What a step's event says: the factor of its arithmetic, where there are slow ranks."""
        return {"slow_factor": self._factor} if self._slow.slow else {}

    def begin(self, step: int, recorded: bool = False) -> None:
        """A step begins. step: its number, or that of its share of the text. recorded: its storages are followed, so
        that its time says nothing about its arithmetic."""
        if not self.active:
            return
        self._recorded = recorded
        self.spans.clear()
        self._factor = self._slow.factor(self._rank, step)
        if self._emulated is None:
            self._sleep((self._factor - 1) * self._arithmetic)
        self._began, self._cpu, self._waited = time.perf_counter(), time.thread_time(), self._pulse.waited

    def computed(self) -> None:
        """The arithmetic of the step is done; its exchange follows."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # Standing still for other ranks is no arithmetic, nor is the time that a rank has no core.
        elapsed = time.perf_counter() - self._began - (self._pulse.waited - self._waited)
        if not self._recorded:
            self._arithmetic = min(time.thread_time() - self._cpu, elapsed)
        if self._emulated is None:
            return
        if elapsed > self._emulated * self._factor and not self._recorded:
            self.exceeded += 1
            self.longest = max(self.longest, elapsed)
        self._sleep(self._emulated * self._factor - elapsed)

    def _sleep(self, seconds: float) -> None:
        """Wait with heartbeats: the rank is not stuck."""
        began = time.perf_counter()
        until = began + seconds
        if seconds > 0:
            self._pulse.work("the waiting that --slow and --emulate inject")
            self.seconds += seconds
        while (left := until - time.perf_counter()) > 0:
            time.sleep(min(SLICE, left))
            self._pulse.work()
        if seconds > 0:
            self.spans.append((round(began * 1e9), round(time.perf_counter() * 1e9)))


class TrainingClock:
    """Seconds that a rank trains, and those of them for which it stands still for other ranks."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self.seconds = self.waiting = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Training steps are made inside the context."""
        began, waited = time.perf_counter(), self._pulse.waited
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began
            self.waiting += self._pulse.waited - waited

    def of_rank(self, rank: int, injected: float) -> RankWaiting:
        return RankWaiting(rank, self.seconds, self.waiting, injected)
