"""A file written from its start to its end, past the page cache where the file system allows it (`O_DIRECT`).

Why: a checkpoint is read again by nobody soon. The page cache would take new pages for all of it, copy into them and
drop what is worth more; on two cores that both train, that was four fifths of what a save took of a rank's time
(docs/decisions.md). FastPersist (Wang et al., 2024, arXiv:2406.13768) writes checkpoints so, too.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

CHUNK = 4 << 20
"""Bytes written at once: enough that what a call and the disk's answer take does not count."""


class StraightFile:
    """A new file. Raises `FileExistsError` when there is one, and what the operating system says of a full disk."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by finish or close)
        # A map of its own begins at a page's start, as direct writes must.
        self._map = mmap.mmap(-1, CHUNK)
        self._chunk = np.frombuffer(self._map, dtype=np.uint8)
        self._filled = 0
        self._straight = self._mode(os.O_DIRECT)

    def write(self, data: memoryview) -> None:
        """The next bytes. What is written last may reach the disk only with `finish`."""
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
        self._go_round()
        self._flush()
        size = self._file.tell()
        os.fsync(self._file.fileno())
        self._file.close()
        return size

    def close(self) -> None:
        """Close it as it is."""
        self._file.close()

    def _flush(self) -> None:
        left = memoryview(self._map)[: self._filled]
        while len(left):
            try:
                left = left[self._file.write(left) :]
            except OSError:
                # Not every file system that takes the flag writes everything so; and what a full disk takes last has
                # any length.
                if not self._straight:
                    raise
                self._go_round()
        self._filled = 0

    def _go_round(self) -> None:
        """From here on through the page cache."""
        self._mode(0)
        self._straight = False

    def _mode(self, flag: int) -> bool:
        """Set or clear direct writing; whether that could be done."""
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flag)
        except OSError:
            return False
        return True
