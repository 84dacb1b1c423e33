"""Peak rate of the machine's matrix products, the reference of a run's utilization."""

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.checkpoint.file_io import memory
from shardwise.errors import UserError
from shardwise.runtime.transport.waits import cycles_per_second


def has_cuda() -> bool:
    return torch.cuda.is_available()


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.25) -> float:
    """FLOP/s of square matrix products on all ranks together, measured on all of them at once: of the quickest kind.

    Size 1,024 on CPU and 8,192 on CUDA: large enough for the library's best kernels. A CPU without bf16 instructions is
    quickest in fp32, in which it may compute as well. The median of
    several products counts, so that a moment's disturbance does not.
    """
    size = 8192 if device.type == "cuda" else 1024
    kinds = {dtype} if device.type == "cuda" else {dtype, torch.promote_types(dtype, torch.float32)}
    dist.barrier()
    times = [_median_time(torch.rand(size, size, device=device).to(kind), seconds / len(kinds)) for kind in kinds]
    reached = device if dist.get_backend() == "nccl" else torch.device("cpu")
    rate = torch.tensor(2 * size**3 / min(times), dtype=torch.float64, device=reached)
    dist.all_reduce(rate)
    return float(rate)


def _median_time(a: torch.Tensor, seconds: float) -> float:
    """Seconds of a product, as a linear layer has its operands, which is repeated for so long."""
    b = a.t()
    times = timed(partial(torch.mm, a, b, out=a @ b), a.device, seconds)
    return sorted(times)[len(times) // 2]


def timed(call: Callable[[], object], device: torch.device, seconds: float, least: int = 1) -> list[float]:
    """Seconds of several calls, which are made for so long, and so often at least."""
    ends = time.perf_counter() + seconds
    times: list[float] = []
    while len(times) < least or time.perf_counter() < ends:
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return times


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class DeviceQueue:
    """Times calls on a CUDA device by its own clock, without what the host takes to make them: it makes them while the
    device waits in a timed kernel."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._rate = device, cycles_per_second(device)

    def seconds(self, call: Callable[[], object], count: int, waits: float) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        synchronize(self._device)
        torch.cuda._sleep(max(1, round(waits * self._rate)))
        start.record()
        for _ in range(count):
            call()
        end.record()
        synchronize(self._device)
        return float(start.elapsed_time(end)) / 1e3 / count


REQUEST = 12 << 20
"""Bytes of a request: the three arrays of a load of offloaded state (`layout.homes`)."""
FILE = 24 * REQUEST
"""Bytes of the file that is written and read."""
_REASONS = {
    errno.EROFS: "it is read-only",
    errno.EACCES: "it may not be written to",
    errno.EPERM: "it may not be written to",
    errno.ENOSPC: "it is full",
    errno.EDQUOT: "the quota is used up",
    errno.EINVAL: "its file system has no direct I/O",
    errno.EOPNOTSUPP: "its file system has no direct I/O",
    errno.ENOENT: "there is no such directory",
    errno.ENOTDIR: "it is no directory",
}


class DiskRates(NamedTuple):
    """Bytes/s of streaming."""

    read: float
    write: float


def disk_rates(folder: Path, nbytes: int = FILE) -> DiskRates:
    """Write a file of `nbytes` bytes in whole requests, and read it again, past the page cache; it is removed.

    Raises `UserError` in one line where the folder is read-only, full, or has no direct I/O.
    """
    buffer = memory(REQUEST)
    buffer[:] = os.urandom(mmap.PAGESIZE) * (REQUEST // mmap.PAGESIZE)  # some disks compress pages of zeros
    try:
        number, name = tempfile.mkstemp(prefix="shardwise-disk-", dir=folder)
        os.close(number)
        file = -1
        try:
            file = os.open(name, os.O_RDWR | os.O_DIRECT)
            write = _streamed(file, buffer, nbytes, reads=False)
            return DiskRates(_streamed(file, buffer, nbytes, reads=True), write)
        finally:
            with suppress(OSError):
                os.close(file)
            Path(name).unlink()
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror)
        raise UserError(f"cannot measure the disk of {folder}: {reason}; choose another folder (--disk)") from None


def _streamed(file: int, buffer: mmap.mmap, nbytes: int, reads: bool) -> float:
    """Bytes/s of whole requests one after the other, until the disk has them."""
    started, at = time.perf_counter(), 0
    while at < nbytes:
        count = os.preadv(file, [buffer], at) if reads else os.pwrite(file, buffer, at)
        if count < len(buffer):
            raise OSError(errno.ENOSPC, "the disk took less than a request")
        at += count
    if not reads:
        os.fdatasync(file)
    return at / (time.perf_counter() - started)
