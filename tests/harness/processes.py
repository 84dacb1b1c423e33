"""Looking at processes from outside."""

from __future__ import annotations

import os


def children(pid: int) -> list[int]:
    """Process ids of a process's children, as Linux tells them."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
