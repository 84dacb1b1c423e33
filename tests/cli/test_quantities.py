"""Numbers and sizes on the command line."""

from argparse import ArgumentTypeError

import pytest

from shardwise.cli.quantities import bytes_of, length_of, numbers
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


def test_lengths_are_read_as_contexts_are_named():
    texts = {"8192": 8192, "8k": 8192, "128K": 131_072, "1M": 1 << 20, " 0 ": 0}
    assert {text: length_of(text) for text in texts} == texts
    for text in ("", "8q", "-8k", "1.5k", "k"):
        with pytest.raises(ArgumentTypeError, match="no whole number, such as 8192 or 8k"):
            length_of(text)
