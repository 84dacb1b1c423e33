"""What every test run prints besides its results: the seed of the sampled layouts, and measurements side by side; and
how `make test` divides the tests between two processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from harness import summary

# Times are never asserted: the machine that runs the tests may be doing something else.
settings.register_profile("shardwise", deadline=None)
settings.load_profile("shardwise")


@pytest.fixture
def leftovers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are killed leave their temporary files where pytest clears away."""
    folder = str(tmp_path_factory.mktemp("leftovers"))
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)


def pytest_report_header() -> str:
    from harness.pipelines import pipeline_cases
    from harness.space import all_cases
    from harness.today import EVERYTHING, seed

    count = len(all_cases()) + len(pipeline_cases())
    if EVERYTHING:
        return f"layouts: all {count} generated cases (SHARDWISE_ALL=1)"
    return f"layouts: a sample of {count} cases, SHARDWISE_SEED={seed()}"


ROOT = Path(__file__).parent
LONGEST = [ROOT / "runtime", ROOT / "test_readme.py", ROOT / "test_demo.py"]
"""What begins first: what comes last should be short."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files stay whole, for what their tests share. Those of ranks are one group: each has processes for all cores, and
    two of them at a time take longer than one after the other."""

    def group(item: pytest.Item) -> Path:
        return LONGEST[0] if item.path.parent == LONGEST[0] else item.path

    for item in items:
        item.add_marker(pytest.mark.xdist_group(str(group(item).relative_to(ROOT))))
    items.sort(key=lambda item: LONGEST.index(group(item)) if group(item) in LONGEST else len(LONGEST))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that runs some of the tests hands its measurements to the one that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tables"] = summary.tables


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for title, (header, *rows) in getattr(node, "workeroutput", {}).get("tables", {}).items():
        for row in rows:
            summary.add(title, tuple(header), tuple(row))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for title, lines in summary.sections():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
