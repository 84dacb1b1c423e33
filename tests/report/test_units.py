"""Numbers as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.report.units import (
    format_apart,
    format_bytes,
    format_count,
    format_ranks,
    format_share,
    format_spans,
    format_time,
)


@from_table
def test_bytes(n, text):
    assert format_bytes(n) == text


def test_binary_bytes():
    assert [format_bytes(n, binary=True) for n in (1023, 1024, 80 * 2**30)] == ["1023 B", "1.00 KiB", "80.0 GiB"]


@given(st.integers(min_value=1, max_value=10**20), st.booleans())
def test_bytes_are_right_to_three_digits(n, binary):
    number, unit = format_bytes(n, binary).split()
    powers = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"] if binary else ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    assert float(number) * (1024 if binary else 1000) ** powers.index(unit) == pytest.approx(n, rel=0.0051)


def test_counts():
    assert [format_count(n) for n in (12, 12_345, 7e9, 1.2e12)] == ["12", "12.3k", "7.00B", "1.20T"]


@from_table
def test_time(seconds, text):
    assert format_time(seconds) == text


def test_shares_never_round_a_difference_away():
    assert [format_share(x) for x in (0, 1e-9, 0.0123, -0.5, 12.5)] == ["0%", "<0.01%", "1.23%", "-50.0%", "1,250%"]
    assert format_share(0.0123, signed=True) == "+1.23%"


@given(st.sets(st.integers(0, 60), min_size=1))
def test_spans_name_exactly_their_numbers(numbers):
    found = set()
    for span in format_spans(tuple(sorted(numbers))).split(","):
        first, _, last = span.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == numbers


def test_ranks():
    assert [format_ranks((3,)), format_ranks((0, 1, 2, 8))] == ["rank 3", "ranks 0-2,8"]


@given(st.integers(1, 10**13), st.integers(1, 10**13))
def test_different_sizes_are_told_apart(n, other):
    a, b = format_apart(n, other)
    assert (a == b) == (n == other) or abs(n - other) < 1e-8 * max(n, other)
    assert format_apart(149.4e9, 149.1e9) == ("149.4 GB", "149.1 GB")
    assert format_apart(150e9, 83e9) == ("150 GB", "83.0 GB")
