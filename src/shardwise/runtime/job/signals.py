"""Signals that a part of a program handles itself. Imports no torch."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], Any] | signal.Handlers
) -> Iterator[None]:
    """Have `handler` get these signals until the end of the block, and the handlers of before afterwards.

    A signal that is ignored, such as SIGHUP under nohup, remains so. Outside the main thread, which alone may install
    handlers, nothing changes.
    """
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
