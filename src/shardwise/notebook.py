"""What runs in a notebook's cell, and for how long: nothing else shows there that a long call is alive."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 1.0
"""Seconds of a call before anything is shown, and between two updates."""


def _display() -> Any:
    """IPython's `display` in a notebook's kernel; elsewhere None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.modules["IPython"].display.display if type(shell).__name__ == "ZMQInteractiveShell" else None


@contextmanager
def running(doing: str) -> Iterator[None]:
    """In a notebook, show under the cell what runs and for how many seconds; nothing of it stays."""
    display = _display() if threading.current_thread() is threading.main_thread() else None
    if display is None:
        yield
        return
    done, began = threading.Event(), time.monotonic()

    def tick() -> None:
        handle = None
        while not done.wait(PATIENCE):
            text = {"text/plain": f"{doing}: {time.monotonic() - began:.0f} s"}
            if handle is None:
                handle = display(text, raw=True, display_id=True)
            else:
                handle.update(text, raw=True)
        if handle is not None:
            handle.update({"text/plain": ""}, raw=True)

    clock = threading.Thread(target=tick, daemon=True)
    clock.start()
    try:
        yield
    finally:
        done.set()
        clock.join()
