"""Values of users in scripts and objects: whatever a value holds, it stays data.

`quoted` is the only place where a value becomes text of another language. Lines of --setup are code, and only checked.
"""

import re
import shlex
import unicodedata
from collections.abc import Callable, Iterable

from shardwise.errors import UserError

LONGEST = 32_768
"""Bytes of a value: Linux passes 128 KiB per argument, and a script for Kubernetes is one argument."""
LONGEST_OPTION = 4096
"""Bytes of a value in a line of sbatch, which older releases read into a buffer of 8 KiB."""
_FORBIDDEN = {
    "Cc": "a control character",
    "Zl": "a line separator",
    "Zp": "a paragraph separator",
    "Cs": "a byte that is not UTF-8",
}
"""Category of Unicode -> description: all that ends a line somewhere, and bytes that are not UTF-8."""


def _sbatch(value: str) -> str:
    """A value as sbatch reads its lines: a backslash escapes in any quotes, but no blank outside of them."""
    return value if re.fullmatch(r"[\w@%+=:,./-]*", value, re.ASCII) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


_SYNTAXES: dict[str, Callable[[str], str]] = {
    "shell": shlex.quote,
    "sbatch": _sbatch,
    "kubernetes": lambda value: value.replace("$", "$$"),
    "json": str,
    "code": str,
}
"""Syntax -> a value in it. Kubernetes fills $(NAME) in variables and arguments, and reads $$ as one $."""


def quoted(syntax: str, value: str, what: str) -> str:
    """A value in one of `_SYNTAXES`. what: its origin, for the error.

    Raises `UserError` for a value with control characters, line breaks or bytes that are not UTF-8, and for one that is
    too long.
    """
    for character in value:
        if name := _FORBIDDEN.get(unicodedata.category(character)):
            raise UserError(f"{what} {shortened(value)} has {name} ({character!a}): {instead(what)}")
    most = LONGEST_OPTION if syntax.startswith("sbatch") else LONGEST
    if len(value.encode()) > most:
        raise UserError(f"{what} {shortened(value)} has more than {most:,} bytes: put it into a file")
    return _SYNTAXES[syntax](value)


def joined(words: Iterable[str], what: str) -> str:
    """Words of a shell's command."""
    return " ".join(quoted("shell", word, what) for word in words)


def comment(text: str) -> str:
    """Text on one line, for a comment: control characters and line breaks become blanks."""
    return " ".join("".join(" " if unicodedata.category(item) in _FORBIDDEN else item for item in text).split())


def shortened(value: str) -> str:
    """A value in an error, at most 60 characters."""
    return ascii(value) if len(value) <= 60 else f"{ascii(value[:50])[:-1]}...'"


FOLDER, SETUP, COMMAND = "the working directory", "--setup", "the command's word"
_INSTEAD = {
    FOLDER: "start `launch` in a folder with another name",
    SETUP: "give --setup once per line",
    COMMAND: "put it into a file, such as a script",
}


def instead(what: str) -> str:
    """What to do about a value that cannot be used."""
    return _INSTEAD.get(what, "give another one")
