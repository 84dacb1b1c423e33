"""A file of JSON objects, one a line, that is only ever appended to. One process writes it; any number may read it."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.errors import UserError, os_errors
from shardwise.report.strict_json import strict
from shardwise.small_files import json_object


class JsonLines:
    """The file, which need not exist yet. Close it after appending."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def append(self, item: Mapping[str, Any]) -> None:
        """Append an object and hand it to the operating system. JSON has no NaN: it is written as the text "NaN", and
        infinities as "Infinity" and "-Infinity", which `float` reads back. Raises `UserError` if it cannot."""
        line = json.dumps(strict(dict(item)), allow_nan=False, separators=(",", ":")) + "\n"
        with os_errors(f"write {self.path}"):
            if self._file is None:
                self._file = self._open()
            self._file.write(line.encode())
            self._file.flush()

    def items(self, after: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """(cursor, object) of each whole line after a cursor; pass the last cursor to see only what came since.

        A last line that is still being written, or was torn by a crash, is left out. Raises `UserError` when another
        line is damaged, or the cursor lies beyond the file.
        """
        if not self.path.exists() and after == 0:
            return
        with os_errors(f"read {self.path}"), self.path.open("rb") as file:
            if after > os.fstat(file.fileno()).st_size:
                raise UserError(f"{self.path} is shorter than the cursor {after}: read it from the start")
            file.seek(after)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                after += len(line)
                item = json_object(line)
                if item is None:
                    raise UserError(f"{self.path} is damaged: the line that ends at byte {after} is not a JSON object")
                yield after, item

    def close(self) -> None:
        if self._file is not None:
            # What cannot be written now could not be written before: `append` said so.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        """The file at its end. A line torn by a crash is cut off first: it would damage the next one."""
        file = self.path.open("ab+")
        file.seek(0)
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
        return file
