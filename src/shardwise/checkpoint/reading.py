"""Reading bytes of an open file: all of them, or a line that says why not."""

from __future__ import annotations

import os

from shardwise.errors import UserError


class DamagedError(UserError):
    """Files that are not as they were written: changed, cut short or missing."""


def read_exactly(handle: int, data: memoryview, offset: int, what: str, short: str) -> None:
    """Fill `data` from `offset` on. Raises `UserError`: "cannot read `what`", and `DamagedError(short)` where the file
    ends before."""
    while len(data):
        try:
            got = os.preadv(handle, [data], offset)
        except OSError as error:
            raise UserError(f"cannot read {what}: {error.strerror}") from None
        if not got:
            raise DamagedError(short)
        data, offset = data[got:], offset + got
