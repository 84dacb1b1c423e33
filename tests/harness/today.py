"""What a day's tests take of what is generated: a sample by the day's seed, or everything with SHARDWISE_ALL=1."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from datetime import date
from typing import TypeVar

import pytest

T = TypeVar("T")
EVERYTHING = os.environ.get("SHARDWISE_ALL") == "1"


def seed() -> int:
    """SHARDWISE_SEED, which repeats another day's sample; else today's date as a number."""
    given = os.environ.get("SHARDWISE_SEED") or date.today().strftime("%Y%m%d")
    if not given.isdecimal():
        pytest.exit(f"SHARDWISE_SEED must be a whole number, not {given!r}", 2)
    return int(given)


def some_of(cases: Iterable[T], count: int, name: str) -> list[T]:
    """`count` of `cases`, in their order, or all of them. name: of what they are; each name has a sample of its own."""
    every = list(cases)
    if EVERYTHING:
        return every
    return [every[i] for i in sorted(random.Random(f"{name} {seed()}").sample(range(len(every)), count))]


def of_some(case: str, cases: Iterable[str], count: int) -> pytest.MarkDecorator:
    """A mark for a test that is one of `cases`: it runs on the days when `case` is among `count` of them."""
    names = list(cases)
    assert case in names
    return pytest.mark.skipif(case not in some_of(names, count, " ".join(names)), reason="not in today's sample")


TORCHRUN = ("killed", "foreign", "hung", "two agents")
"""Tests that start torchrun, which imports torch once per rank."""
