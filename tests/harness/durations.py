"""Records what tests cost, for `quick.py`: `make durations` runs them with this plugin, and then this file's `main`.

A test's seconds go without fixtures that others share. Such a fixture stands in the table itself where it costs more
than all tests of a file that use it: they then have one turn. Whatever is not in a recording keeps its entry.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RAW = os.environ.get("SHARDWISE_DURATIONS", "")
"""A file to which a line is added for each test: [name, seconds, {fixture: seconds}, fixtures it uses]."""
EXPENSIVE = 0.6
"""Seconds of a test with all of its cases, on two quiet cores, from which on it has turns."""
Row = list[float | None]
"""[seconds, cases]; no seconds of what has not been recorded yet."""
_seconds: dict[str, float] = defaultdict(float)


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.user_properties.append(("uses", list(getattr(item, "fixturenames", ()))))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[Any]:
    started = time.monotonic()
    result = yield
    if fixturedef.scope != "function":
        request._pyfuncitem.user_properties.append(("made", (fixturedef.argname, time.monotonic() - started)))
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that hears of all tests, also of those that others run."""
    _seconds[report.nodeid] += report.duration
    if report.when == "teardown" and "PYTEST_XDIST_WORKER" not in os.environ:
        made = dict(value for name, value in report.user_properties if name == "made")  # type: ignore[misc]
        uses = next((value for name, value in report.user_properties if name == "uses"), [])
        with Path(RAW).open("a") as file:
            file.write(json.dumps([report.nodeid, _seconds.pop(report.nodeid), made, uses]) + "\n")
    if report.skipped:
        _seconds[report.nodeid] = -1e9  # of a test that did not run nothing is known


def table(lines: list[list[Any]], before: dict[str, Row]) -> dict[str, Row]:
    """Name -> [seconds, cases] of all tests, or fixtures, that are expensive."""
    tests: dict[str, list[float]] = {}
    fixtures: dict[str, float] = defaultdict(float)
    users: dict[str, set[str]] = defaultdict(set)
    for node, seconds, made, uses in lines:
        name = node.partition("[")[0]
        if seconds < 0:
            continue
        file = name.partition("::")[0]
        found = tests.setdefault(name, [0.0, 0])
        # A fixture's time has that of those it asks for: the longest is all of them.
        found[0] += max(0.0, seconds - max(made.values(), default=0.0))
        found[1] += 1
        for fixture, its in made.items():
            fixtures[f"{file}::{fixture}"] = max(its, fixtures[f"{file}::{fixture}"])
        for fixture in uses:
            users[f"{file}::{fixture}"].add(name)
    known = set(tests) | set(fixtures)
    rows: dict[str, Row] = {name: row for name, row in before.items() if name not in known}
    rows |= {name: [round(row[0], 1), int(row[1])] for name, row in tests.items() if row[0] >= EXPENSIVE}
    for fixture, seconds in fixtures.items():
        if seconds >= max(EXPENSIVE, sum(tests[name][0] for name in users[fixture] if name in tests)):
            rows[fixture] = [round(seconds, 1), 1]
    return dict(sorted(rows.items()))


def main(raw: Path, out: Path) -> None:
    before = json.loads(out.read_text()) if out.exists() else {}
    lines = [json.loads(line) for line in raw.read_text().splitlines()]
    rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in table(lines, before).items()]
    out.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
