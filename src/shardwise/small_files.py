"""Small text files that a user names, such as a `config.json`: read whole, but never without an end."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MOST = 1 << 24
"""Bytes of the largest file that is read: a `config.json` has some kilobytes, a cluster's file some hundred."""


def read_small(path: Path, most: int = MOST) -> str:
    """Text of a regular file of at most `most` bytes, as UTF-8.

    Raises `OSError` for a file that cannot be read, is larger, or is no file: a device such as /dev/zero has no end,
    and a named pipe makes its reader wait. Raises `UnicodeDecodeError` for other encodings.
    """
    _check(path, path.stat(), most)  # before it is opened: opening a device or a pipe may itself do something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _check(path, os.fstat(descriptor), most)
        content = bytearray()
        while piece := file.read(1 << 16):  # which allocates what it is asked for
            content += piece
            if len(content) > most:
                raise _too_large(path, most)
    return content.decode("utf-8")


def json_object_in(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where it holds none, or cannot be read."""
    try:
        return json_object(path.read_bytes()) or {}
    except OSError:
        return {}


def json_object(text: bytes) -> dict[str, Any] | None:
    """The object that a JSON text holds; None where it holds none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _check(path: Path, about: os.stat_result, most: int) -> None:
    if stat.S_ISDIR(about.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if about.st_size > most:
        raise _too_large(path, most)


def _too_large(path: Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
