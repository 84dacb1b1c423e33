"""What a terminal of 80 columns shows, whole: compared with tests/cli/snapshots/.

`make snapshots` writes them again: read the difference before you commit it.
"""

import os
from pathlib import Path

import pytest

SNAPSHOTS = Path(__file__).parent / "snapshots"
COMMANDS = {
    "plan": "plan llama-3-70b --cluster 8x8xH100 --seq 8192 --batch 1024",
    "plan-serve": "plan llama-3-70b --cluster 8xH100 --serve --prompt 1024 --output 256 --concurrency 64",
    "estimate": "estimate llama-3-70b --layout tp=8,dp=8,zero=1,sp,recompute=full --cluster 8x8xH100 --seq 8192 "
    "--batch 512",
    "compare": "generate llama-3-70b --compare tp=8 zero=3,dp=8 pp=8 --cluster 8xH100",
}


WIDE = (
    "estimate llama-3-70b --layout tp=8,pp=2,dp=4,zero=1,sp --cluster 8x8xH100 --seq 8192 --batch 512 --breakdown",
    "estimate deepseek-v3 --layout dp=512,ep=64,zero=3,recompute=full --cluster 64x8xH100 --seq 4096 --batch 512 "
    "--breakdown",
    "estimate --params 1e12 --zero-table 1,8,64,512",
    "list models --weights",
    "list links",
    "--help",
)
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
