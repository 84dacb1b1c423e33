"""Settings of the C library for freed memory of CPU tensors.

By default glibc returns large blocks to the system and the next step faults every page in again: 4 to 6% of a step of
2,048 tokens (docs/decisions.md). A rank that trains needs the same memory again at once, so it keeps it.
"""

import ctypes
import sys
from typing import Any

_MMAP_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -4, -3, -1  # malloc.h
_BLOCKS, _LARGEST, _TRIM = 65536, 32 << 20, 64 << 20
"""Where glibc's own settings arrive by themselves once a process has freed a large block."""


def retain_freed_memory(keep: bool = True) -> None:
    """Retain memory that this process frees, or return it as usual. Does nothing without glibc."""
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return
    mallopt(_MMAP_MAX, 0 if keep else _BLOCKS)
    mallopt(_MMAP_THRESHOLD, _LARGEST)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1 if keep else _TRIM)


def release_freed_memory() -> None:
    """Return the whole pages of what this process has freed so far, which takes some milliseconds. Does nothing without
    glibc."""
    if trim := _glibc("malloc_trim"):
        trim(0)


def _glibc(function: str) -> Any:
    """A function of the C library; None where it has no such one."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform.startswith("linux") else None
