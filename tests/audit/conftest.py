"""Recordings of torch itself, and one process that has imported torch for all programs that are audited."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.audits import AuditServer
from harness.pool import Pool
from shardwise.cli.main import main

RANKS = 3


@pytest.fixture(scope="module")
def audits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuditServer]:
    server = AuditServer(Path(tmp_path_factory.mktemp("audits")))
    yield server
    server.close()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What torch records of `recorded_jobs`, by ranks of their own: a Flight Recorder keeps what a process did."""
    folder, pool = tmp_path_factory.mktemp("recorded"), Pool(RANKS)
    try:
        pool.run("harness.recorded_jobs:behind", RANKS, folder)
        pool.run("harness.recorded_jobs:late", RANKS, folder)
        yield folder
    finally:
        pool.close()


@pytest.fixture
def audit(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `shardwise audit ...`: (exit code, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        code = main(["audit", *map(str, words)])
        out, err = capfd.readouterr()
        return code, out, err

    return run
