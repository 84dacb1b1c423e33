from collections import Counter
from collections.abc import Iterator
from datetime import date, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from harness import quick
from harness.durations import table
from harness.quick import DAYS, LAYOUTS_A_DAY, RANKS, dealt, is_quick, left_out, pairs, today
from harness.space import SPACES, cases


class Item(SimpleNamespace):
    """What `quick.py` looks at of a test. marks: by their names."""

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)


def item(name: str, *fixtures: str, **marks: Any) -> Any:
    return Item(nodeid=name, fixturenames=fixtures, marks=marks)


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rows = {"a.py::test_expensive": (20.0, 20), "a.py::test_single": (7.0, 1), "a.py::model": (9.0, 1)}
    monkeypatch.setattr(quick, "costs", lambda: rows)
    quick.turns.cache_clear()
    yield
    quick.turns.cache_clear()


def test_layouts_of_a_fortnight_have_every_pair() -> None:
    layouts = [point.layout for name in SPACES for point in cases(name)]
    days = dealt(layouts)
    few = [layout for layout in layouts if layout.ranks <= RANKS]
    run = [layout for layout, day in zip(layouts, days, strict=True) if day is not None]
    assert set().union(*map(pairs, run)) == set().union(*map(pairs, few))
    assert all(layout.ranks <= RANKS for layout in run) and len(run) < len(few)
    counts = Counter(day for day in days if day is not None)
    assert set(counts) == set(range(DAYS)) and set(counts.values()) <= {*range(LAYOUTS_A_DAY, 17)}


@pytest.mark.usefixtures("costs")
def test_every_case_has_one_turn_and_cheap_tests_have_all() -> None:
    items = [item(f"a.py::test_expensive[{n}]") for n in range(20)]
    items += [item("a.py::test_single"), item("a.py::test_new"), item("a.py::test_single", every_day=object())]
    days = [sum(column) for column in zip(*(is_quick(items, day) for day in range(DAYS)), strict=True)]
    assert days == [1] * 20 + [1, DAYS, DAYS]
    each = [sum(is_quick(items[:20], day)) for day in range(DAYS)]
    assert set(each) == {1, 2}, "cases of one test are spread over the days"


@pytest.mark.usefixtures("costs")
def test_tests_that_share_an_expensive_fixture_have_one_turn() -> None:
    items = [item(f"a.py::test_{n}", "model") for n in range(3)] + [item("b.py::test_0", "model")]
    for day in range(DAYS):
        first, second, third, other = is_quick(items, day)
        assert first == second == third and other
    assert sum(is_quick(items, day)[0] for day in range(DAYS)) == 1


@pytest.mark.usefixtures("costs")
def test_two_parts_are_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item(f"a.py::test_expensive[{n}]") for n in range(20)] + [item("a.py::test_new")]
    away = {}
    for part in ("quick", "rest", ""):
        monkeypatch.setattr(quick, "PART", part)
        away[part] = left_out(items)
    assert not away["quick"] & away["rest"] and away["quick"] | away["rest"] == {one.nodeid for one in items}
    assert "a.py::test_new" in away["rest"] and away[""] == set()


@pytest.mark.parametrize("first", ["20261118", "20261225"])
def test_days_that_follow_have_all_turns(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    found = set()
    for days in range(DAYS):
        seed = date.fromisoformat(first) + timedelta(days)
        monkeypatch.setenv("SHARDWISE_SEED", seed.strftime("%Y%m%d"))
        found.add(today())
    assert found == set(range(DAYS))


def test_the_table_names_tests_that_exist() -> None:
    gone = []
    for name in quick.costs():
        file, _, function = name.partition("::")
        path = quick.TABLE.parents[1] / file
        texts = [one.read_text() for one in (path, path.with_name("conftest.py")) if one.exists()]
        gone += [name] * all(f"def {function}(" not in text for text in texts)
    assert gone == [], "take them out of tests/durations.json"


def test_a_recording_keeps_what_it_has_not_run() -> None:
    lines = [
        ["a.py::test_x[1]", 2.0, {}, []],
        ["a.py::test_x[2]", 1.0, {}, []],
        ["a.py::test_cheap", 0.1, {}, []],
        ["a.py::test_skipped", -1e9, {}, []],
        ["a.py::test_first", 9.5, {"model": 9.0}, ["model"]],
        ["a.py::test_second", 1.5, {}, ["model"]],
    ]
    before = {"a.py::test_skipped": [5.0, 1], "a.py::test_cheap": [3.0, 1]}
    assert table(lines, before) == {
        "a.py::test_x": [3.0, 2],
        "a.py::test_skipped": [5.0, 1],
        "a.py::test_second": [1.5, 1],
        "a.py::model": [9.0, 1],
    }
