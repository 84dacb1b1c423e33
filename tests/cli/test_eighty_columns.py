"""What a terminal of 80 columns shows, whole: compared with tests/cli/snapshots/.

`make snapshots` writes them again: read the difference before you commit it.
"""

import os
from pathlib import Path

import pytest

from harness.cases import table

SNAPSHOTS = Path(__file__).parent / "snapshots"
COMMANDS = table(__file__, "COMMANDS")


WIDE = table(__file__, "WIDE")
"""Commands whose tables fit at every width, with the first column."""


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("words", WIDE)
def test_tables_fit(words, width, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = command(*words.split())
    assert (code, err) == (0, "") and max(len(line.rstrip()) for line in out.splitlines()) <= width and "…" not in out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_output_at_80_columns(name, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = command(*COMMANDS[name].split())
    lines = [line.rstrip() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert max(map(len, lines)) <= 80 and "…" not in out
    shown = "\n".join([f"$ shardwise {COMMANDS[name]}", *lines, ""])
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("SHARDWISE_SNAPSHOTS") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown)
    assert shown == path.read_text()
