"""What every test run prints besides its results: the seed of the sampled layouts, and measurements side by side."""

import os
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from harness import summary

LEFT_OUT = pytest.StashKey[int]()
"""Tests that are not in the part of the day that runs."""

# Times are never asserted: the machine that runs the tests may be doing something else. Where CI is set, hypothesis
# would draw what no seed changes.
settings.register_profile("shardwise", deadline=None, derandomize=False)
settings.load_profile("shardwise")


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No width of whichever terminal, or test runner, started the tests."""
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """What tests depend on, whatever started them: rich takes a terminal that is dumb, or has no name, for 80 columns
    wide, and the package reads the key of its clients, its place among ranks, and settings of memory.
    No test connects to the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("HF_HUB_OFFLINE", "1")
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            patch.delenv(name, raising=False)
        for name in ("SHARDWISE_API_KEY", "GLIBC_TUNABLES", "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def leftovers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are killed leave their temporary files where pytest clears away."""
    folder = str(tmp_path_factory.mktemp("leftovers"))
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)


@pytest.fixture
def several_hosts() -> None:
    """Skipped, with the reason, where the lab cannot make hosts."""
    from harness.hosts import needs_hosts

    needs_hosts()


@pytest.fixture
def heeded() -> Iterator[None]:
    """Signals do what they do in a shell of one's own: whoever runs the tests in a background, or with nohup, has them
    ignored."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    from harness.today import seed

    # What is drawn is the day's too, so that a repeated day has the same examples.
    config.option.hypothesis_seed = config.option.hypothesis_seed or str(seed())
    config.addinivalue_line("markers", "every_day: an expensive test that the quick part runs every day")
    if "SHARDWISE_DURATIONS" in os.environ:
        from harness import durations

        config.pluginmanager.register(durations)
    config.addinivalue_line("markers", "layouts(of): parameters -> Layout; the quick part deals them out (quick.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from harness.quick import left_out
    from harness.today import too_many

    cases: dict[str, list[str]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item.nodeid)
    away = left_out(items)
    config.stash[LEFT_OUT] = len(away)
    out = away.union(*(too_many(names, test) for test, names in cases.items()))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    items[:] = [item for item in items if item.nodeid not in out]


def pytest_report_header() -> str:
    from harness.space import cases
    from harness.today import EVERYTHING, MOST, seed

    count = len(cases("dense")) + len(cases("pipelines"))
    if EVERYTHING:
        most = f", {MOST} of each test at most (SHARDWISE_MOST, SHARDWISE_SEED={seed()})" if MOST else ""
        return f"layouts: all {count} generated cases (SHARDWISE_ALL=1){most}"
    return f"layouts: a sample of {count} cases, SHARDWISE_SEED={seed()}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker of pytest-xdist has collected the same tests, the process that starts them none."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    from harness.quick import left_to_others

    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(left_to_others(count))
    for title, lines in summary.sections(terminalreporter.stats.get("passed", [])):
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
