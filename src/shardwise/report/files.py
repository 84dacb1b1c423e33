"""Files that are there whole or not at all."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from shardwise.errors import UserError


def write_whole(path: Path, text: str, what: str = "") -> None:
    """Write a text. what: it is, for the error. Raises `UserError` when the file cannot be written."""
    if not path.name:
        raise UserError(f"cannot write {what}{' ' * bool(what)}{path}: it is a folder; name a file")
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise UserError(f"cannot write {what}{' ' * bool(what)}{path}: {error.strerror}") from None
