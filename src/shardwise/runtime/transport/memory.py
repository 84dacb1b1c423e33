"""Memory that processes of one host share: segments, each made by one process and mapped by others.

A segment is an anonymous file (`memfd_create`) that peers open through /proc/PID/fd. It has no name that could be left
behind, so nothing remains of it once the last process that mapped it has ended, however it ended; and it does not count
against the size of /dev/shm, which containers limit to 64 MB. Its pages are reserved when it is made: where they cannot
be had, that is an `OSError` then and not a SIGBUS later.
"""

import mmap
import os
import platform
import select
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNED = 64
"""Bytes of a cache line."""

_serials = count(1)


def can_share() -> str | None:
    """Why processes here cannot share memory this way; None when they can."""
    if not hasattr(os, "memfd_create") or not Path("/proc/self/fd").is_dir():
        return f"{platform.system()} has no memfd_create or no /proc"
    if platform.machine() not in ("x86_64", "AMD64"):
        # Data must be visible before the flag that announces it: a promise that x86-64 makes for plain stores.
        return f"{platform.machine()} may reorder stores"
    return None


def network() -> int:
    """Number of this process's network namespace: processes in different ones count as different hosts."""
    return Path("/proc/self/ns/net").stat().st_ino


def _name(pid: int, serial: int) -> str:
    """Name under /proc. A process has the segments that it maps among its open files, too: whose they are must show."""
    return f"shardwise-{pid}-{serial}"


class SharedSegment:
    """Memory of this process that other processes map. serial: its number in this process. Raises `OSError`."""

    def __init__(self, nbytes: int) -> None:
        self.serial, self.nbytes = next(_serials), nbytes
        self._fd = os.memfd_create(_name(os.getpid(), self.serial))
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
            self.map = mmap.mmap(self._fd, nbytes)
        except OSError:
            os.close(self._fd)
            raise

        self.address = self.bytes.__array_interface__["data"][0]

    @property
    def bytes(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.map, np.uint8)

    def tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """The first elements, as a flat tensor with a storage of exactly that size; it keeps the memory mapped."""
        return torch.frombuffer(self.map, dtype=dtype, count=elements)

    def close(self) -> None:
        """No more peers may map it. The memory goes when nobody has it mapped any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Peer:
    """Another process of this host: its segments, mapped when they are first needed, and whether it lives.

    Raises `OSError` where /proc does not show it: another user's process, or one in another container.
    """

    def __init__(self, rank: int, pid: int) -> None:
        self.rank, self.pid = rank, pid
        self._maps: dict[int, mmap.mmap] = {}
        self._life = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._life, select.POLLIN)

    def lives(self) -> bool:
        """Whether the process has not ended; a process that nobody has waited for yet has ended as well."""
        return not self._poll.poll(0)

    def map(self, serial: int) -> mmap.mmap:
        """The segment that the peer made as its `serial`-th. Raises `RuntimeError` when the peer has ended."""
        if serial not in self._maps:
            try:
                self._maps[serial] = self._open(serial)
            except OSError:
                # A process loses its files a moment before it is seen to have ended.
                if not self._poll.poll(1000):
                    raise
                raise RuntimeError(f"rank {self.rank} has ended") from None
        return self._maps[serial]

    def _open(self, serial: int) -> mmap.mmap:
        name = f"/memfd:{_name(self.pid, serial)} (deleted)"
        folder = f"/proc/{self.pid}/fd"
        # Plain strings: a process may have hundreds of files open. What was made last is likely looked for.
        for number in sorted(os.listdir(folder), key=int, reverse=True):  # noqa: PTH208
            link = f"{folder}/{number}"
            with suppress(OSError):
                if os.readlink(link) == name:  # noqa: PTH115
                    fd = os.open(link, os.O_RDWR)
                    try:
                        return mmap.mmap(fd, os.fstat(fd).st_size)
                    finally:
                        os.close(fd)
        raise FileNotFoundError(f"process {self.pid} shares no segment {serial}")

    def forget(self) -> None:
        """Unmap what no array refers to any more, and stop watching."""
        self._maps.clear()
        if self._life >= 0:
            os.close(self._life)
            self._life = -1


class SpinWait:
    """Spin, then yield, then sleep until a flag is set: it spins while that is likely to be short, then lets others
    run, then naps, the longer the longer it has waited.

    spins: polls before the first yield; none where ranks share cores, since the one that is waited for needs this one.
    rests: nothing is likely to come soon, as while nobody asks an engine anything: its naps are the longest at once.
    """

    SPINS = 2000
    YIELDS_S = 0.002
    NAP_S, LONGEST_NAP_S = 50e-6, 5e-3
    LOOKS_EVERY_S = 0.02

    def __init__(self, ranks: int, cores: int, timeout: float) -> None:
        self.spins = self.SPINS if ranks <= cores else 0
        self.timeout = timeout
        self.rests = False
        self.look: Callable[[], object] = lambda: None
        """Called now and then while it waits: it raises what ends the wait."""

    def wait(self, flags: memoryview, at: int, value: int, peer: Peer) -> None:
        """Return when flags[at] >= value. Raises `RuntimeError` when the peer has ended, or after the timeout."""
        for _ in range(self.spins):
            if flags[at] >= value:
                return
        started = now = time.monotonic()
        looked = started
        while flags[at] < value:
            if self.rests:
                time.sleep(self.LONGEST_NAP_S)
            elif now - started < self.YIELDS_S:
                os.sched_yield()
            else:
                time.sleep(min(max(self.NAP_S, (now - started) / 100), self.LONGEST_NAP_S))
            now = time.monotonic()
            if now - looked < self.LOOKS_EVERY_S:
                continue
            looked = now
            self.look()
            # It may have ended after it wrote the flag.
            if not peer.lives() and flags[at] < value:
                raise RuntimeError(f"rank {peer.rank} has ended")
            if now - started > self.timeout:
                raise RuntimeError(f"rank {peer.rank} did not come within {self.timeout:g} s")
