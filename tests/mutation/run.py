"""Put known mistakes back one at a time and see that a test fails for each: `python tests/mutation/run.py [WORD]`.

Works on a copy of src/. A mistake whose text is not found exactly once is an error, and so are tests that break instead
of failing, or a test that fails without the mistake, too: each one that noticed is run again on the source as it is.
WORD: only the mistakes of that trap number, or with it in their words.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mistakes import MISTAKES, TESTS, Mistake

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED = 0, 1
SECONDS_A_JOB = 40


def pytest(source: Path, *chosen: str) -> tuple[int, str]:
    """Run the tests that pytest's arguments choose on the package in `source`, up to the first failure.

    Returns (exit code, output).
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SHARDWISE_ALL": "1",  # a mistake may show in a case that is not today's
        "SHARDWISE_TEST_LIMIT": str(SECONDS_A_JOB),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def uses(source: Path) -> bool:
    """Whether a run with `source` on its path imports the package from there."""
    probe = [sys.executable, "-c", "import shardwise; print(shardwise.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    found = subprocess.run(probe, env=environment, cwd=source, capture_output=True, text=True, check=True).stdout
    return Path(found.strip()).is_relative_to(source)


def put_back(source: Path, mistake: Mistake) -> None:
    """Make the mistake in the copy."""
    path = source / "shardwise" / mistake.file
    path.write_text(path.read_text().replace(mistake.old, mistake.new))


def misplaced(source: Path, mistakes: list[Mistake]) -> list[str]:
    """Mistakes whose text does not occur exactly once."""
    wrong = []
    for mistake in mistakes:
        found = (source / "shardwise" / mistake.file).read_text().count(mistake.old)
        if found != 1:
            wrong.append(f"trap {mistake.trap}, {mistake.file}: {found} times, not once: {mistake.old!r}")
    return wrong


@contextmanager
def copy_of(source: Path) -> Iterator[Path]:
    """A folder that holds a copy of the package in `source`, for a while."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        target = Path(folder).resolve()
        shutil.copytree(source / "shardwise", target / "shardwise", ignore=shutil.ignore_patterns("__pycache__"))
        yield target


def survives(clean: Path, mistake: Mistake) -> str | None:
    """None when a test fails because of the mistake; else what happened instead."""
    with copy_of(clean) as source:
        put_back(source, mistake)
        code, output = pytest(source, *TESTS, "-k", mistake.tests)
    if code == PASSED:
        return "SURVIVED"
    failed = re.search(r"^FAILED (.+?\]?)(?: - |$)", output, re.MULTILINE)
    if code != FAILED or failed is None:
        return f"BROKE (exit {code}): {output.strip().splitlines()[-1]}"
    code, output = pytest(clean, failed[1])
    return None if code == PASSED else f"FAILS ANYWAY: {failed[1]}: {output.strip().splitlines()[-1]}"


def main(argv: list[str]) -> int:
    word = argv[0] if argv else ""
    chosen = [m for m in MISTAKES if not word or word == str(m.trap) or word in m.what]
    with copy_of(ROOT / "src") as clean:
        if problem := why_not(clean, chosen):
            print(problem)
            return 1
        failures = 0
        for mistake in chosen:
            started = time.monotonic()
            problem = survives(clean, mistake)
            failures += problem is not None
            seconds = f"{time.monotonic() - started:4.0f} s"
            print(f"trap {mistake.trap:2}  {problem or 'noticed':8}  {seconds}  {mistake.what}", flush=True)
    print(f"{len(chosen) - failures} of {len(chosen)} mistakes noticed")
    return 1 if failures else 0


def why_not(clean: Path, chosen: list[Mistake]) -> str | None:
    """Why the mistakes cannot be tried: no such one, or text not found. None when they can."""
    if not chosen:
        return "no such mistake"
    if wrong := misplaced(clean, chosen):
        return "\n".join(wrong)
    return None if uses(clean) else "the copy of src/ is not what the tests import"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
