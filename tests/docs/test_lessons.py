"""The lessons run: their own assertions hold the numbers that they teach."""

from pathlib import Path

import pytest

from harness.documents import ROOT, python
from harness.today import some_of

LESSONS = sorted((ROOT / "lessons").glob("*.py"))
pytestmark = pytest.mark.usefixtures("leftovers")


@pytest.mark.parametrize("path", some_of(LESSONS, 2, "lessons"), ids=lambda path: path.stem)
def test_a_lesson_runs(path: Path, tmp_path: Path) -> None:
    assert "assert " in path.read_text()
    done = python(str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
