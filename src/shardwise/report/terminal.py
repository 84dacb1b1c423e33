"""Text that fits a terminal: it wraps between words and between the keys of a layout."""

import os
import re
import textwrap
from typing import TYPE_CHECKING, TextIO, TypeAlias

if TYPE_CHECKING:
    from rich.console import RenderableType

Renderable: TypeAlias = "RenderableType"
"""A text or a table, where rich is not loaded."""

BREAKS = re.compile(r"(\s+|(?<=,)(?=[a-z]))")
"""Places where a line may end: white space, and between two keys of a layout."""


class Verbatim(str):
    """A file's text, whose lines are printed as they are at every width."""


class _Wrapper(textwrap.TextWrapper):
    def _split(self, text: str) -> list[str]:
        return [chunk for chunk in BREAKS.split(text) if chunk]


def wrap(text: str, width: int) -> str:
    """`text` in lines of at most `width` characters. An indented line continues two characters further in."""
    lines: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        wrapper = _Wrapper(width, initial_indent=indent, subsequent_indent=indent + "  " if indent else "")
        lines += wrapper.wrap(line.lstrip()) or [""]
    return "\n".join(lines)


def fitted(text: str, stream: TextIO) -> str:
    """`text` in lines as wide as `COLUMNS`, or a stream's terminal, or else as it is. No word is cut."""
    if not (columns := _columns(stream)):
        return text
    wrapper = _Wrapper(columns, subsequent_indent="  ", break_long_words=False)
    return "\n".join(part for line in text.split("\n") for part in wrapper.wrap(line) or [""])


def _columns(stream: TextIO) -> int:
    """0 where nothing says how wide it is."""
    if (width := os.environ.get("COLUMNS", "")).isdecimal():
        return int(width)
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except OSError:  # a terminal in name alone
        return 0
