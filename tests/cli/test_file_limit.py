"""A limit on open files is one line with its reason."""

import resource
import subprocess
import sys

import pytest

from shardwise.errors import file_limit

LIMIT = 10


def test_the_command_line_names_the_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "estimate", "tiny-llama", "--layout", "dp=2", "--seq", "64", "--batch", "4",
         "--cluster", "2xcpu", "--dry-run"],
        capture_output=True, text=True, timeout=60, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        f"shardwise: error: too many open files: a process may open {LIMIT} "
    )


@pytest.mark.parametrize(
    "error",
    [
        OSError(24, "Too many open files"),
        RuntimeError("[enforce fail at loop.cc:105] fd_ != -1. epoll_create: Too many open files"),
    ],
)
def test_whoever_meets_the_limit(error: Exception) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert file_limit(error).startswith(f"too many open files: a process may open {most} ")
    assert file_limit(ValueError("too many values")) == ""
