"""What the C library does with memory that tensors on CPU give back.

By default glibc returns large blocks to the system and the next step faults every page in again: 4 to 6% of a step of
2,048 tokens (docs/performance.md). A rank that trains needs the same memory again at once, so it keeps it.
"""

from __future__ import annotations

import ctypes
import sys

_MMAP_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -4, -3, -1  # malloc.h
_BLOCKS, _LARGEST, _TRIM = 65536, 32 << 20, 64 << 20
"""Where glibc's own settings arrive by themselves once a process has freed a large block."""


def keep_freed_memory(keep: bool = True) -> None:
    """Let this process keep what it frees, or return it as usual. Does nothing without glibc."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_MMAP_MAX, 0 if keep else _BLOCKS)
    mallopt(_MMAP_THRESHOLD, _LARGEST)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1 if keep else _TRIM)
