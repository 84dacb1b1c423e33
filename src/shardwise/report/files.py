"""Files that are there whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwise.errors import UserError


def write_whole(path: Path, text: str, what: str = "") -> None:
    """Write a text. what: it is, for the error. Raises `UserError` when the file cannot be written."""
    with _told(path, what) as partial:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def check_place(path: Path, what: str = "") -> None:
    """Raise now the `UserError` of `write_whole`, as far as it can be known before there is a text."""
    with _told(path, what) as partial:
        partial.touch()
        partial.unlink()


@contextmanager
def _told(path: Path, what: str) -> Iterator[Path]:
    """Beside the path the place of a file that is not whole yet; a failure leaves nothing there and is raised."""
    if not path.name:
        raise UserError(f"cannot write {what}{' ' * bool(what)}{path}: it is a folder; name a file")
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise UserError(f"cannot write {what}{' ' * bool(what)}{path}: {error.strerror}") from None
