"""Reading bytes of an open file: all of them, or a line that says why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shardwise.errors import UserError, os_errors


class DamagedError(UserError):
    """Files that are not as they were written: changed, cut short or missing."""


@contextmanager
def opened(path: Path, what: str = "checkpoint is") -> Iterator[BinaryIO]:
    """A file to read. Raises `UserError` where it cannot be read, `DamagedError` where it is missing: "the `what` not
    whole"."""
    with os_errors(f"read {path}"):
        try:
            with path.open("rb") as file:
                yield file
        except FileNotFoundError:
            raise DamagedError(f"{path} is missing: the {what} not whole") from None


def read_exactly(handle: int, data: memoryview, offset: int, what: str, short: str) -> None:
    """Fill `data` from `offset` on. Raises `UserError`: "cannot read `what`", and `DamagedError(short)` where the file
    ends before."""
    with os_errors(f"read {what}"):
        while len(data):
            got = os.preadv(handle, [data], offset)
            if not got:
                raise DamagedError(short)
            data, offset = data[got:], offset + got
