"""Commands of docs/your_own_model.md print what the page has. SHARDWISE_SNAPSHOTS=write rewrites the page."""

import os
import re
from pathlib import Path

from harness import forked

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "your_own_model.md"


def test_the_page_has_what_the_commands_print(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(# model.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "model.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    blocks = re.findall(r"^```console\n(\$ shardwise (.*?)\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [words.split()[0] for _, words in blocks] == ["trace", "estimate", "plan"]
    for block, words in blocks:
        done = forked.shardwise(*words.split(), environment=environment, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
        lines = [f"$ shardwise {words}", *(line.rstrip() for line in done.stdout.splitlines()), ""]
        page = page.replace(block, "\n".join(lines))
    if os.environ.get("SHARDWISE_SNAPSHOTS") == "write":
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page
