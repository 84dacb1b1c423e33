"""The tables that the documents quote are those of the committed results."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("docs/performance.md", "docs/collectives.md", "docs/pipelines.md")


def table(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/table.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_quoted_tables_are_the_committed_results() -> None:
    done = table("--check", *DOCUMENTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_figure_is_noticed(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    start = text.index("<!-- bench:speed-2 -->")
    figure = text.index("0.", start)
    changed = tmp_path / "performance.md"
    changed.write_text(text[:figure] + "9." + text[figure + 2 :])
    done = table("--check", str(changed))
    assert done.returncode == 1 and "Traceback" not in done.stderr
