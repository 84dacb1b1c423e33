"""Commands and programs that documents quote, run as a reader would."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from harness import forked

ROOT = Path(__file__).parents[2]
SHORTER = {
    ("calibrate", "device"): ["--seconds", "2"],
    ("calibrate", "network"): ["--sizes", "4KiB,1MiB,32MiB", "--rounds", "2", "--force"],
    ("collective", "bench"): ["--rounds", "2"],
}
"""What measures gets these words behind its own: its figures are not looked at here."""
LIMIT = 900


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT
    )


def run(program: str, *words: str, cwd: Path) -> str:
    """Standard output of a command in a folder, which must succeed."""
    if program == "torchrun":
        done = python("-m", "torch.distributed.run", *words, cwd=cwd)
    else:
        words += tuple(SHORTER.get(words[:2], ()))
        done = forked.shardwise(*words, environment=ENVIRONMENT, timeout=LIMIT, folder=cwd)
        if "measure again with more --seconds" in done.stderr:  # other tests had the cores
            done = forked.shardwise(*words, "--seconds", "20", environment=ENVIRONMENT, timeout=LIMIT, folder=cwd)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line) for block in blocks(text, "sh") for line in block.replace("\\\n", "").splitlines()]
