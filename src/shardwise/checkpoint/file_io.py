"""Reading bytes of an open file: all of them, or a line that says why not.

A file written from its start to its end, past the page cache where the file system allows it (`O_DIRECT`).

Why: a checkpoint is read again by nobody soon. The page cache would take new pages for all of it, copy into them and
drop what is worth more; on two cores that both train, that was four fifths of what a save took of a rank's time
(docs/decisions.md). FastPersist (Wang et al., 2024, arXiv:2406.13768) writes checkpoints so, too.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from shardwise.errors import UserError, os_errors


class DamagedError(UserError):
    """Files that are not as they were written: changed, cut short or missing."""


@contextmanager
def opened(path: Path, what: str = "checkpoint is") -> Iterator[BinaryIO]:
    """A file to read. Raises `UserError` where it cannot be read, `DamagedError` where it is missing: "the `what` not
    whole"."""
    with os_errors(f"read {path}"):
        try:
            with path.open("rb") as file:
                yield file
        except FileNotFoundError:
            raise DamagedError(f"{path} is missing: the {what} not whole") from None


def read_exactly(handle: int, data: memoryview, offset: int, what: str, short: str) -> None:
    """Fill `data` from `offset` on. Raises `UserError`: "cannot read `what`", and `DamagedError(short)` where the file
    ends before."""
    with os_errors(f"read {what}"):
        while len(data):
            got = os.preadv(handle, [data], offset)
            if not got:
                raise DamagedError(short)
            data, offset = data[got:], offset + got


def set_direct(handle: int, direct: bool = True) -> bool:
    """Set or clear direct input and output; whether that could be done."""
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, os.O_DIRECT if direct else 0)
    except OSError:
        return False
    return True


CHUNK = 4 << 20
"""Bytes written at once: enough that what a call and the disk's answer take does not count."""


def memory(nbytes: int) -> mmap.mmap:
    """Memory from which files can be written directly: a map of its own begins at a page's start."""
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Not every kernel has huge pages; the disk's driver looks each page up.
        with suppress(OSError):
            made.madvise(mmap.MADV_HUGEPAGE)
    return made


class DirectFile:
    """A new file. Raises `FileExistsError` when there is one, and what the operating system says of a full disk.

    image: `memory` that holds the whole file's bytes already; what is written is then not copied, and is where it will
    be in the file.
    """

    def __init__(self, path: Path, image: mmap.mmap | None = None) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by finish or close)
        self._image = None if image is None else memoryview(image)
        self._chunk = np.frombuffer(memory(CHUNK), dtype=np.uint8) if image is None else np.empty(0, np.uint8)
        self._filled = 0
        self._straight = set_direct(self._file.fileno())

    def write(self, data: memoryview) -> None:
        """The next bytes. What is written last may reach the disk only with `finish`."""
        if self._image is not None:
            self._filled += len(data)
            if self._filled >= CHUNK:
                self._flush(self._filled % CHUNK)
            return
        values = np.frombuffer(data, dtype=np.uint8)
        while len(values):
            part = values[: CHUNK - self._filled]
            self._chunk[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            values = values[len(part) :]
            if self._filled == CHUNK:
                self._flush()

    def finish(self) -> int:
        """Wait until all of it is on the disk, and close it. Returns its bytes."""
        # The end is seldom as long as direct writes want it.
        self._flush(self._filled % mmap.PAGESIZE)
        self._go_round()
        self._flush()
        size = self._file.tell()
        os.fsync(self._file.fileno())
        self._file.close()
        return size

    def close(self) -> None:
        self._file.close()

    def _flush(self, rest: int = 0) -> None:
        """Write what has come together, but for the last `rest` bytes."""
        source = self._chunk.data if self._image is None else self._image[self._file.tell() :]
        left = source[: self._filled - rest]
        while len(left):
            try:
                left = left[self._file.write(left) :]
            except OSError:
                # Not every file system that takes the flag writes everything so; and what a full disk takes last has
                # any length.
                if not self._straight:
                    raise
                self._go_round()
        if self._image is None:
            self._chunk[:rest] = self._chunk[self._filled - rest : self._filled]
        self._filled = rest

    def _go_round(self) -> None:
        set_direct(self._file.fileno(), False)
        self._straight = False
