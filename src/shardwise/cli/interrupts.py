"""Signals that ask a command to end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shardwise.runtime.job.signals import handled

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

    See `handled` for signals that are ignored, and for other threads than the main one.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Ended(number)

    with handled(ENDING, stop):
        yield
