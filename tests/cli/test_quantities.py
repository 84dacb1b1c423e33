"""Numbers and sizes on the command line."""

from __future__ import annotations

import pytest

from shardwise.cli.quantities import bytes_of, numbers
from shardwise.errors import UserError


def test_sizes_are_read():
    texts = {"4096": 4096, "64MB": 64 * 10**6, "1.5KiB": 1536, "2 gb": 2 * 10**9, "1k": 1000}
    assert {text: bytes_of("--bytes", text) for text in texts} == texts
    for text in ("", "MB", "-1", "1XB", "1e400"):
        with pytest.raises(UserError, match=f"^--bandwidth {text}: give a size"):
            bytes_of("--bandwidth", text)


def test_numbers_are_read():
    assert numbers("--ranks", "8") == [8] and numbers("--ranks", "2, 4,1-3") == [1, 2, 3, 4]
    for text in ("", "0", "-4", "1-", "a"):
        with pytest.raises(UserError, match=f"^--micro {text}: give numbers"):
            numbers("--micro", text)
