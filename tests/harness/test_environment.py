"""The tests' own environment: whatever starts them, a command line finds the same one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

TESTS = Path(__file__).parents[1]
WIDTH = "cli/test_pipeline.py::test_a_narrow_terminal_loses_no_figure"
"""A test that fails under a dumb terminal, unless the tests set TERM."""


@pytest.mark.parametrize("term", [{}, {"TERM": "dumb"}], ids=["unset", "dumb"])
def test_no_terminal_is_needed(term: dict[str, str]) -> None:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment = {**kept, **term, "LC_ALL": "C", "PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", WIDTH]
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
