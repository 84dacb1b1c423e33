"""`make test`: the tests of ranks and all other tests, side by side.

Tests whose ranks work together run one after the other, at normal priority. Ranks wait for one another much of the
time, which leaves more than half of two cores idle. The other tests fill it on two workers at low priority, longest
files first; their output follows when the ranks have ended.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
RANKS = (TESTS / "runtime", TESTS / "serving")
ONE_PROCESS = (
    "runtime/test_adding.py", "runtime/test_blocks.py", "runtime/test_buffers.py", "runtime/test_dryrun.py",
    "runtime/test_installed.py", "runtime/test_patience.py", "runtime/test_pulse.py", "runtime/test_rank.py",
    "runtime/test_samples.py", "runtime/test_shared_plan.py", "runtime/test_short_attention.py",
    "runtime/test_torch_versions.py", "serving/test_attention.py", "serving/test_bubble.py",
    "serving/test_http_api.py", "serving/test_http_chat.py", "serving/test_http_fuzz.py",
    "serving/test_http_openai.py", "serving/test_http_server.py", "serving/test_lockstep.py",
    "serving/test_sampling.py", "serving/test_scheduler.py", "serving/test_text.py",
)  # fmt: skip
"""Files in these folders that start no ranks."""
LONGEST = ("test_readme.py", "test_demo.py", "runtime/test_dryrun.py")
PYTEST = (sys.executable, "-m", "pytest", "-q")


def others() -> list[Path]:
    """What runs beside the tests of ranks, the longest first."""
    every = sorted({*TESTS.glob("test_*.py"), *TESTS.glob("[a-z]*/")} - set(RANKS))
    first = [TESTS / name for name in LONGEST]
    return first + [path for path in [*every, *map(TESTS.joinpath, ONE_PROCESS)] if path not in first]


def main() -> int:
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen(
            ["nice", "-n", "10", *PYTEST, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", *others()],
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            ranks = subprocess.call([*PYTEST, *RANKS, *(f"--ignore={TESTS / name}" for name in ONE_PROCESS)])
            codes = {ranks, beside.wait()}
        finally:
            beside.terminate()
            beside.wait()
        output.seek(0)
        print("\nTests without ranks of their own, which ran at the same time:", flush=True)
        sys.stdout.buffer.write(output.read())
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
