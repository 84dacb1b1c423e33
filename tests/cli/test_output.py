"""What a command says while it works: nothing in a pipe, one line on a terminal, gone afterwards."""

import os
import pty
import subprocess
import sys

from harness.documents import ENVIRONMENT

PROGRAM = (
    "import time; from shardwise.cli import output; output.PATIENCE = {patience}\n"
    "with output.working('pricing layouts'): time.sleep(0.3)\n"
    "print('done')"
)


def on_a_terminal(patience: float) -> str:
    """Standard error of the program, if that is a terminal."""
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(patience=patience)], stdout=subprocess.PIPE, stderr=theirs,
        env={**ENVIRONMENT, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    assert (done.returncode, done.stdout) == (0, b"done\n")
    said = b""
    try:
        while piece := os.read(ours, 4096):
            said += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return said.decode()


def test_a_slow_command_says_what_it_does_and_removes_it() -> None:
    said = on_a_terminal(patience=0.0)
    assert "pricing layouts" in said and said.endswith("\x1b[2K")


def test_a_fast_command_says_nothing() -> None:
    assert "pricing" not in on_a_terminal(patience=60.0)


def test_nothing_is_said_in_a_pipe() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(patience=0.0)], capture_output=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"done\n", b"")


def test_how_far_it_is_is_a_line_in_a_pipe() -> None:
    program = "from shardwise.cli import output\nwith output.working('dry run') as say: say('1 of 2')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=ENVIRONMENT, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"dry run: 1 of 2\n")
