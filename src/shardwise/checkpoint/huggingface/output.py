"""A new folder that is written whole, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.writer import sync_folder
from shardwise.errors import UserError


@dataclass(frozen=True)
class Exported:
    """Result of an export: the folder, its files, tensors, and the bytes of all tensors. nonfinite: tensors with an
    element that is not finite."""

    folder: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    nonfinite: tuple[str, ...] = ()
    dtype: str = "float32"


class OutputFolder:
    """A folder that files are written to: `files` are the ones made here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, list[str]()

    @classmethod
    @contextmanager
    def new(cls, folder: Path) -> Iterator[OutputFolder]:
        """A folder that is new or empty; on an error nothing of it is left. Raises `UserError` when it is in use or
        cannot be written."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is not empty; nothing was overwritten: choose another folder")
        output = cls(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            yield output
            sync_folder(folder)
        except BaseException as error:
            output.remove()
            if isinstance(error, OSError):
                raise UserError(f"cannot write to {folder}: {error.strerror}") from None
            raise

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Make a file, complete on the disk when this returns. One that is there already is an `OSError`."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as file:
            self.files.append(name)
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Make a JSON file."""
        self.write(name, [(json.dumps(content, indent=2) + "\n").encode()])

    def remove(self) -> None:
        """Remove what was written."""
        for name in self.files:
            with suppress(OSError):
                (self.folder / name).unlink()
        for folder in {(self.folder / name).parent for name in self.files} - {self.folder}:
            with suppress(OSError):
                folder.rmdir()
        with suppress(OSError):
            self.folder.rmdir()
