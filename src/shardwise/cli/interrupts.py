"""Signals that ask a command to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """The command was ended by a signal. exit_code: 128 and the signal's number, as shells have it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """While it lasts, SIGTERM and SIGHUP end the command as Ctrl-C does, so that everything on the way out clears up
    behind it: by a `KeyboardInterrupt` that names the signal.

    A signal that is ignored, such as SIGHUP under nohup, remains so. Outside the main thread, which alone may install
    handlers, it does nothing. The handlers of before are back afterwards.
    """
    before = {}

    def stop(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
