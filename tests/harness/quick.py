"""The quick part of a day's tests, which `make test` runs; `make test-day` runs the rest.

Tests that cost little run every day, and so do new ones and those with the mark `every_day`. The costs of the others
are in `tests/durations.json`: each of their cases has its turn once in a fortnight. Tests with the mark `layouts` have
turns of another kind: the layouts on few ranks are dealt out so that a fortnight has every pair of values of two keys.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from datetime import date
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from harness.today import PART, seed
from shardwise.layout import Layout

DAYS = 14
RANKS = 4
LAYOUTS_A_DAY = 12
"""At least."""
TABLE = Path(__file__).parents[1] / "durations.json"
Costs = dict[str, tuple[float, int]]


def today() -> int:
    """The day of the fortnight that the seed stands for: a date's, so that days that follow have all turns."""
    text = str(seed())
    try:
        return date.fromisoformat(text).toordinal() % DAYS
    except ValueError:
        return seed() % DAYS


def costs() -> Costs:
    """Test, or a fixture that costs more than all tests that share it -> (seconds of all cases, cases).

    What starts processes and has not been recorded yet is in the table without a time, and counts as a second.
    """
    return {name: (seconds or 1.0, cases) for name, (seconds, cases) in json.loads(TABLE.read_text()).items()}


@cache
def turns() -> dict[str, int]:
    """Name in the table -> the day of its first case. The most expensive first, each where least is to do so far."""
    load, found = [0.0] * DAYS, {}
    for name, (seconds, cases) in sorted(costs().items(), key=lambda each: (-each[1][0], each[0])):
        first = found[name] = load.index(min(load))
        for case in range(cases):
            load[(first + case) % DAYS] += seconds / cases
    return found


def entry(item: pytest.Item) -> tuple[str, bool] | None:
    """(a test's name in the table, whether all of its cases have one turn); None for a test that costs little."""
    file, _, function = item.nodeid.partition("[")[0].partition("::")
    names = [f"{file}::{name}" for name in getattr(item, "fixturenames", ())]
    for name in names:
        if name in turns():
            return name, True
    name = f"{file}::{function}"
    return (name, False) if name in turns() else None


def pairs(layout: Layout) -> set[tuple[tuple[str, object], ...]]:
    """Every pair of a layout's keys with their values; of stages, whether they are uneven."""
    values = [(field.name, getattr(layout, field.name)) for field in fields(layout)]
    return set(combinations([(name, bool(value) if name == "stages" else value) for name, value in values], 2))


def dealt(layouts: Sequence[Layout]) -> list[int | None]:
    """The day of each layout on few ranks, those first that add most pairs, until all days together have every pair and
    each has `LAYOUTS_A_DAY`; None for all others."""
    few = [i for i, layout in enumerate(layouts) if layout.ranks <= RANKS]
    numbers: dict[object, int] = {}
    masks = {i: sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs(layouts[i])) for i in few}
    missing, place = (1 << len(numbers)) - 1, 0
    days: list[int | None] = [None] * len(layouts)
    while few and (missing or place < DAYS * LAYOUTS_A_DAY):
        best = max(few, key=lambda i: (masks[i] & missing).bit_count())
        few.remove(best)
        missing &= ~masks[best]
        days[best], place = place % DAYS, place + 1
    return days


def is_quick(items: Sequence[pytest.Item], day: int) -> list[bool]:
    found, cases = [], dict[str, int]()
    of_layouts = [item for item in items if item.get_closest_marker("layouts")]
    days = dict(zip([item.nodeid for item in of_layouts], dealt(list(map(_layout, of_layouts))), strict=True))
    for item in items:
        if item.nodeid in days:
            found.append(days[item.nodeid] == day)
        elif item.get_closest_marker("every_day") or not (known := entry(item)):
            found.append(True)
        else:
            name, together = known
            case = cases[name] = cases.get(name, -1) + 1
            found.append((turns()[name] + case * (not together)) % DAYS == day)
    return found


def left_out(items: Sequence[pytest.Item]) -> set[str]:
    """The names of the tests that the part of the day which runs leaves out."""
    if not PART:
        return set()
    # Of layouts the rest has the day's sample, not all: which of them the quick part has run it does not know.
    if PART == "rest":
        items = [item for item in items if not item.get_closest_marker("layouts")]
    runs = PART == "quick"
    return {item.nodeid for item, fast in zip(items, is_quick(items, today()), strict=True) if fast != runs}


def left_to_others(count: int) -> str:
    if PART == "rest":
        return f"{count:,} tests are in the quick part of this day: SHARDWISE_SEED={seed()} make test"
    return (
        f"{count:,} tests are left to other days (SHARDWISE_SEED=YYYYMMDD make test), or to the rest of this "
        f"one: SHARDWISE_SEED={seed()} make test-day SHARDWISE_PART=rest"
    )


def _layout(item: pytest.Item) -> Layout:
    mark = item.get_closest_marker("layouts")
    assert mark is not None
    return mark.args[0](**item.callspec.params)  # type: ignore[attr-defined]
