"""Put known mistakes back one at a time and see that a test fails for each: `python tests/mutation/run.py [WORD]`.

Works on a copy of src/. A mistake whose text is not found exactly once is an error, and so are tests that break instead
of failing, or a test that fails without the mistake, too: at the end all that noticed run on the source as it is.
WORD: only the mistakes of that trap number, or with it in their words.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED = 0, 1
SECONDS_A_JOB = 40
FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?\]?)(?: - |$)", re.MULTILINE)
"""What failed, or whose fixture did: some fixtures are runs."""


@dataclass(frozen=True)
class Mistake:
    """A row of `mistakes.toml`: one replacement in one file, and the tests that must notice it."""

    file: str
    trap: int
    what: str
    old: str
    new: str
    tests: str


TABLE = tomllib.loads((Path(__file__).parent / "mistakes.toml").read_text(encoding="utf-8"))
ROWS = [Mistake(file, *row) for file, rows in TABLE["mistakes"].items() for row in rows]
MISTAKES = sorted(ROWS, key=lambda mistake: mistake.trap)


def pytest(source: Path, *chosen: str) -> tuple[int, str]:
    """Run the tests that pytest's arguments choose on the package in `source`.

    Returns (exit code, output).
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SHARDWISE_ALL": "1",  # a mistake may show in a case that is not today's
        "SHARDWISE_PART": "",
        "SHARDWISE_TEST_LIMIT": str(SECONDS_A_JOB),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def uses(source: Path) -> bool:
    probe = [sys.executable, "-c", "import shardwise; print(shardwise.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    found = subprocess.run(probe, env=environment, cwd=source, capture_output=True, text=True, check=True).stdout
    return Path(found.strip()).is_relative_to(source)


def put_back(source: Path, mistake: Mistake) -> None:
    path = source / "shardwise" / mistake.file
    path.write_text(path.read_text().replace(mistake.old, mistake.new))


def misplaced(source: Path, mistakes: list[Mistake]) -> list[str]:
    wrong = []
    for mistake in mistakes:
        found = (source / "shardwise" / mistake.file).read_text().count(mistake.old)
        if found != 1:
            wrong.append(f"trap {mistake.trap}, {mistake.file}: {found} times, not once: {mistake.old!r}")
    return wrong


@contextmanager
def copy_of(source: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        target = Path(folder).resolve()
        shutil.copytree(source / "shardwise", target / "shardwise", ignore=shutil.ignore_patterns("__pycache__"))
        yield target


def all_tests(clean: Path) -> list[str]:
    """The names of the tests that may notice a mistake.

    Errors: RuntimeError, with pytest's words, where they cannot be collected.
    """
    code, output = pytest(clean, "--collect-only", *TABLE["tests"])
    if code != PASSED:
        raise RuntimeError(output)
    return [line for line in output.splitlines() if "::" in line]


def files_of(tests: list[str], chosen: str) -> list[str]:
    """The files that hold tests which `chosen` (-k) selects: to collect all the others takes longer than these run."""
    words = chosen.split(" and ")
    return sorted({test.partition("::")[0] for test in tests if all(word in test for word in words)})


def noticed_by(clean: Path, tests: list[str], mistake: Mistake) -> tuple[str | None, str | None]:
    """(the test that fails when the mistake is made, None), or (None, what happened instead)."""
    files = files_of(tests, mistake.tests)
    if not files:
        return None, f"NO TEST is called {mistake.tests}"
    with copy_of(clean) as source:
        put_back(source, mistake)
        code, output = pytest(source, "-x", *files, "-k", mistake.tests)
    if code == PASSED:
        return None, "SURVIVED"
    failed = FAILURE.search(output)
    if code != FAILED or failed is None:
        return None, f"BROKE (exit {code}): {output.strip().splitlines()[-1]}"
    return failed[1], None


def fail_anyway(clean: Path, tests: list[str]) -> list[str]:
    """Of `tests`, those that fail on the source without a mistake, too."""
    code, output = pytest(clean, *tests) if tests else (PASSED, "")
    if code not in (PASSED, FAILED):
        return [f"BROKE (exit {code}): {output.strip().splitlines()[-1]}"]
    return FAILURE.findall(output)


def main(argv: list[str]) -> int:
    word = argv[0] if argv else ""
    chosen = [m for m in MISTAKES if not word or word == str(m.trap) or word in m.what]
    with copy_of(ROOT / "src") as clean:
        if problem := why_not(clean, chosen):
            print(problem)
            return 1
        tests = all_tests(clean)
        noticed = []
        for mistake in chosen:
            started = time.monotonic()
            test, problem = noticed_by(clean, tests, mistake)
            noticed += [test] if test else []
            seconds = f"{time.monotonic() - started:4.0f} s"
            print(f"trap {mistake.trap:2}  {problem or 'noticed':8}  {seconds}  {mistake.what}", flush=True)
        wrong = fail_anyway(clean, sorted(set(noticed)))
    print(*(f"FAILS ANYWAY: {test}" for test in wrong), sep="\n", end="\n" if wrong else "")
    print(f"{len(noticed)} of {len(chosen)} mistakes noticed, {len(wrong)} of these tests fail without a mistake, too")
    return 1 if wrong or len(noticed) < len(chosen) else 0


def why_not(clean: Path, chosen: list[Mistake]) -> str | None:
    """Why the mistakes cannot be tried: no such one, or text not found. None when they can."""
    if not chosen:
        return "no such mistake"
    if wrong := misplaced(clean, chosen):
        return "\n".join(wrong)
    return None if uses(clean) else "the copy of src/ is not what the tests import"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
