"""Put the output of the README's commands into the README: python docs/readme.py, or make figures.

A mark below a command, <!-- output: 1-10 -->, is followed by these lines of what it prints at 80 columns.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

from shardwise.cli.main import main

README = Path(__file__).parents[1] / "README.md"
_BLOCK = re.compile(
    r"(```sh\n(?P<command>shardwise .*?)\n```\n\n<!-- output: (?P<first>\d+)-(?P<last>\d+) -->\n)"
    r"(?P<shown>.*?)(<!-- /output -->)",
    re.DOTALL,
)


def output(command: str) -> list[str]:
    """Lines that a command prints at 80 columns."""
    before, printed = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = "80"
    try:
        with contextlib.redirect_stdout(printed):
            main(shlex.split(command.replace("\\\n", ""))[1:])
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before
    return [line.rstrip() for line in printed.getvalue().splitlines()]


def with_outputs(text: str) -> str:
    """The page with the output of each marked command."""

    def block(found: re.Match[str]) -> str:
        lines = output(found["command"])[int(found["first"]) - 1 : int(found["last"])]
        return "\n".join([found[1] + "```text", *lines, "```", ""]) + found[6]

    return _BLOCK.sub(block, text)


if __name__ == "__main__":
    README.write_text(with_outputs(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {README.name}")
