"""What a day's tests take of what is generated: a sample by the day's seed, or everything with SHARDWISE_ALL=1.

SHARDWISE_MOST=N leaves N cases of each test. SHARDWISE_PART is the part of the day: "quick" or "rest" (`quick.py`), or
nothing for both.
"""

import os
import random
from collections.abc import Iterable, Sequence
from datetime import date
from typing import TypeVar

import pytest

T = TypeVar("T")
EVERYTHING = os.environ.get("SHARDWISE_ALL") == "1"
MOST = int(os.environ.get("SHARDWISE_MOST", "0"))
"""Cases of one test that run at most, others on other days; 0 for all."""
PART = os.environ.get("SHARDWISE_PART", "")
if PART not in ("", "quick", "rest"):
    pytest.exit(f"SHARDWISE_PART is quick, rest or nothing, not {PART!r}", 2)


def seed() -> int:
    """SHARDWISE_SEED, which repeats another day's sample; else today's date as a number."""
    given = os.environ.get("SHARDWISE_SEED") or date.today().strftime("%Y%m%d")
    if not given.isdecimal():
        pytest.exit(f"SHARDWISE_SEED must be a whole number, not {given!r}", 2)
    return int(given)


def some_of(cases: Iterable[T], count: int, name: str) -> list[T]:
    every = list(cases)
    if EVERYTHING:
        return every
    return [every[i] for i in sorted(random.Random(f"{name} {seed()}").sample(range(len(every)), count))]


EVERY_LAYOUT = EVERYTHING or PART == "quick"
"""Whether tests with the mark `layouts` have all of their cases: of those `quick.py` takes the day's."""


def by_turns(cases: Iterable[T], count: int, name: str) -> list[T]:
    return list(cases) if EVERY_LAYOUT else some_of(cases, count, name)


def too_many(names: Sequence[str], test: str) -> set[str]:
    """The names of a test's cases that do not run today."""
    return set(names) - set(random.Random(f"{test} {seed()}").sample(names, MOST)) if 0 < MOST < len(names) else set()


def of_some(case: str, cases: Iterable[str], count: int) -> pytest.MarkDecorator:
    """A mark for a test that is one of `cases`: it runs on the days when `case` is among `count` of them, in the quick
    part when its turn is."""
    names = list(cases)
    assert case in names
    turns = PART == "quick" or "SHARDWISE_DURATIONS" in os.environ
    runs = turns or case in some_of(names, count, " ".join(names))
    return pytest.mark.skipif(not runs, reason="not in today's sample")


TORCHRUN = ("killed", "foreign", "hung", "two agents")
"""Tests that start torchrun, which imports torch once per rank."""
COMPILED = ("inductor", "attention over ranks", "routing", "said of compilation")
RESUMED = ("experts", "experts' losses", "rounds", "optimizers")
LIBRARIES = ("FSDP2", "DTensor", "torch's pipelines", "transformers' experts")
QUANTIZED = ("gradients", "errors", "residuals", "gathers")
SERVERS = ("killed", "killed without restarts", "paused", "cut")
STORAGE = ("read-only", "full", "other text", "vanished text")
FOLLOWED = ("four processes", "loads of a real run", "loads", "a run to its end", "what comes later")
"""Groups of long tests: a few of each group run on a day."""
