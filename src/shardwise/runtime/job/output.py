"""Standard streams whose reader may leave: what cannot be printed never ends a run. Imports no torch."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from shardwise.report.terminal import fitted


def say(line: str) -> None:
    """Write a line to standard error, as wide as its terminal; a reader that has left ends nothing here."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(fitted(line, sys.stderr), file=sys.stderr, flush=True)


def rewrite_line(words: str) -> bool:
    """On a terminal, put words in place of the line of standard error that was written so before. Returns whether it is
    one."""
    live = sys.stderr.isatty()
    if live:
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)
    return live


class _Tolerant:
    """A text stream that goes to /dev/null once it cannot be written, such as a pipe whose reader has left."""

    def __init__(self, stream: TextIO, lost: Callable[[str], object]) -> None:
        self._stream, self._lost = stream, lost

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        # By its number: what is in buffers goes there, too, and the interpreter has nothing to complain about at exit.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        with suppress(OSError):
            self._lost(error.strerror or str(error))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def clear_line(handle: int) -> None:
    """Blank the line that the cursor is on when `handle` is a terminal: a line of progress may stand there, unended."""
    with suppress(OSError):
        if os.isatty(handle):
            width = os.get_terminal_size(handle).columns or 80
            os.write(handle, f"\r{' ' * (width - 1)}\r".encode())


@contextmanager
def tolerant_output(lost: Callable[[str], object] = lambda reason: None) -> Iterator[None]:
    """While it lasts, `print` does not raise where standard output or standard error cannot be written.

    lost: called with the reason when standard output is lost. Streams that are closed altogether (None) stay so.
    """
    before = sys.stdout, sys.stderr
    for name, reported in (("stdout", lost), ("stderr", lambda reason: None)):
        if (stream := getattr(sys, name)) is not None:
            setattr(sys, name, _Tolerant(stream, reported))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
