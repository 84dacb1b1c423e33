"""Two examples of each command, for its help, in `examples.toml`. Tests run them."""

import re
import tomllib
from pathlib import Path

EXAMPLES: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("examples.toml").read_text(encoding="utf-8"))
"""Command -> its examples."""


def broken(example: str, width: int = 78) -> str:
    """An example in lines of about `width` characters, broken between words by backslashes."""
    lines = [""]
    for word in re.findall(r'(?:"[^"]*"|\S)+', example):
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(f"  {line}" for line in lines)
