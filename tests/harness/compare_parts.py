"""What `make test` and the rest of a day run, beside the whole day: `python tests/harness/compare_parts.py [CHECKOUT]`.

Exit code 1 where the two parts leave out a test of the day, where a test has no turn in the fortnight, or where the
day of another checkout, such as an older commit's, has tests, traps or commands that this one has not, in whichever
file; a test that has become a row of a table is named too. Takes three minutes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUT = "SHARDWISE_COLLECTED"
Days = dict[str, list[int]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """As a plugin: write the days of the quick part in which each test that was collected runs."""
    from harness.quick import DAYS, is_quick

    found = [is_quick(items, day) for day in range(DAYS)]
    days = {item.nodeid: [day for day in range(DAYS) if found[day][at]] for at, item in enumerate(items)}
    marked = [item.nodeid for item in items if item.get_closest_marker("layouts")]
    Path(os.environ[OUT]).write_text(json.dumps([days, marked]))


def collected(part: str, checkout: Path = ROOT) -> tuple[Days, set[str]]:
    """(test -> its days, tests with the mark `layouts`); of another checkout the tests alone."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only"]
    around = {**os.environ, "SHARDWISE_PART": part, "PYTHONPATH": f"{checkout / 'tests'}:{checkout / 'src'}"}
    if checkout != ROOT:
        done = subprocess.run(command, cwd=checkout, env=around, capture_output=True, text=True, check=True)
        return {line: [] for line in done.stdout.splitlines() if "::" in line}, set()
    with tempfile.NamedTemporaryFile() as file:
        command += ["-p", "harness.compare_parts"]
        subprocess.run(command, cwd=ROOT, env=around | {OUT: file.name}, stdout=subprocess.DEVNULL, check=True)
        days, marked = json.loads(Path(file.name).read_text())
    return days, set(marked)


def functions(names: Iterable[str]) -> set[str]:
    return {name.partition("[")[0] for name in names}


def commands(names: Iterable[str], checkout: Path = ROOT) -> set[str]:
    from shardwise.cli.commands import COMMANDS

    files = {checkout / name.partition("::")[0] for name in names}
    tables = {table for folder in {file.parent for file in files} for table in folder.glob("*.toml")}
    words = {word for file in files | tables for word in re.findall(r'"([a-z-]+)[" ]', file.read_text())}
    return words & set(COMMANDS)


def traps(names: Iterable[str]) -> set[str]:
    return {trap for name in names for trap in re.findall(r"test_(trap_\d+)", name)}


KINDS: dict[str, Callable[[Iterable[str]], set[str]]] = {
    "tests with their cases": set,
    "tests": functions,
    "traps": traps,
    "commands": commands,
}


def compared(day: set[str], now: set[str], rest: set[str], fortnight: set[str]) -> list[str]:
    missing: list[str] = []
    print(f"{'':24}{'day':>8}{'quick':>8}{'rest':>8}{'fortnight of quick parts':>28}")
    for kind, of in KINDS.items():
        print(f"{kind:24}" + "".join(f"{len(of(s)):8,}" for s in (day, now, rest)) + f"{len(of(fortnight)):28,}")
        missing += [f"neither part of the day: {name}" for name in sorted(of(day) - of(now | rest))]
        if kind != "tests with their cases":
            missing += [f"no day of the fortnight: {name}" for name in sorted(of(day) - of(fortnight))]
    return missing


def main(argv: list[str]) -> int:
    from harness.quick import today

    (day, marked), (turns, of_layouts) = collected(""), collected("quick")
    now = {name for name, days in turns.items() if today() in days}
    rest = {name for name, days in day.items() if name in marked or today() not in days}
    missing = compared(set(day), now, rest, {name for name, days in turns.items() if days})
    dealt: list[Any] = [sum(at in turns[name] for name in of_layouts) for at in range(14)]
    print(f"layouts of each day of the fortnight: {dealt}, of {len(functions(of_layouts))} tests")
    if argv:
        checkout = Path(argv[0]).resolve()
        before = set(collected("", checkout)[0])
        tests, former = ({name.partition("::")[2] for name in functions(each)} for each in (day, before))
        gone = (former - tests) | (traps(before) - traps(day)) | (commands(before, checkout) - commands(day))
        missing += [f"only in {argv[0]}: {name}" for name in sorted(gone)]
    print(*missing or ["nothing is left out"], sep="\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    sys.exit(main(sys.argv[1:]))
