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
