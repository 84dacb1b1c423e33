"""Command lines run in the tests' own process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.cli.main import main


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `shardwise ...`: (exit code, standard output, standard error), those of its ranks included."""

    def run(*argv: object) -> tuple[int, str, str]:
        code = main([str(word) for word in argv])
        out, err = capfd.readouterr()
        return code, out, err

    return run
