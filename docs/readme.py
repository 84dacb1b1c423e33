"""Put the output of the README's first command into the README: python docs/readme.py, or make figures."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

from shardwise.cli.main import main

README = Path(__file__).parents[1] / "README.md"
ALTERNATIVES = 3
"""Alternatives that are quoted of all that `plan` explains."""
_BLOCK = re.compile(r"(<!-- output: plan -->\n)(.*?)(<!-- /output -->)", re.DOTALL)


def plan_output() -> str:
    """The first `sh` block's output at 80 columns, up to the first few alternatives, as a Markdown block."""
    _, command = re.findall(r"^```sh\n(shardwise) (plan .*?)\n```$", README.read_text(encoding="utf-8"), re.MULTILINE)[
        0
    ]
    before, printed = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = "80"
    try:
        with contextlib.redirect_stdout(printed):
            main(shlex.split(command))
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    starts = [i for i, line in enumerate(lines) if i > lines.index("why not") and re.match(r"  \S", line)]
    return "\n".join(["```text", *lines[: starts[ALTERNATIVES]], "  ...", "```", ""])


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    README.write_text(_BLOCK.sub(lambda found: found[1] + plan_output() + found[3], text), encoding="utf-8")
    print(f"wrote {README.name}")
