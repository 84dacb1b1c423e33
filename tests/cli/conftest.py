"""Command lines run in the tests' own process, or, if they start ranks, in a forked one."""

import os
from collections.abc import Callable

import pytest

from harness import forked
from shardwise.cli.main import main

LIMIT = 120


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `shardwise ...`: (exit code, standard output, standard error), those of its ranks included."""

    def run(*argv: object) -> tuple[int, str, str]:
        code = main([str(word) for word in argv])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def ranks_command() -> Callable[..., tuple[int, str, str]]:
    """Run `shardwise ...` where torch is loaded already, for it and for its ranks: as `command` otherwise."""

    def run(*argv: object) -> tuple[int, str, str]:
        done = forked.shardwise(*map(str, argv), environment=os.environ, timeout=LIMIT)
        return done.returncode, done.stdout, done.stderr

    return run
