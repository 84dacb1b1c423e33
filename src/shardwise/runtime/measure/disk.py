"""Streaming speed of a folder's disk by direct I/O, as the files of offloaded state are read and written. No torch."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.direct_io import memory
from shardwise.errors import UserError

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
