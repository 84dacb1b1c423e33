"""Looking at processes from outside."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.runtime.job.launch import supervise
from shardwise.runtime.job.output import say


def launch(command: list[str], ranks: int, *, echo: Callable[[str], None] = say, **options: Any) -> int:
    ending = supervise(command, ranks, **options)
    if ending.line:
        echo(ending.line)
    return ending.code


def children(pid: int) -> list[int]:
    """Process ids of a process's children, whichever of its threads has started them, as Linux tells them."""
    return [int(word) for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
