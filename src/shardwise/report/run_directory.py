"""Files of a run, and how they are read.

    <run>/run.json                configuration, layout, workload, status
    <run>/run.toml                what `train --config` repeats it from
    <run>/events.jsonl            one JSON object a line, only ever appended to
    <run>/updates.jsonl           gradients and updates of parameter servers, appended to where all ranks meet
    <run>/base/                   files beside the tokenizer that it started from: chat template, generation settings
    <run>/reports/*.json          step reports: predicted, measured
    <run>/reports/timelines.json  a step of all ranks on one clock
    <run>/reports/memory.json     memory over the measured step, of one rank of each kind
    <run>/reports/memory.pickle   rank 0's, for pytorch.org/memory_viz
    <run>/reports/timelines-last.json  of the last step
    <run>/reports/trace.json      the measured report's timelines, for ui.perfetto.dev
    <run>/errors/*.txt            tracebacks of ranks that failed
    <run>/checkpoints/step-N      written by the checkpoint code
    <run>/.lock                   who writes it now (runtime/job/locks.py)

One process writes a run; any number may read it meanwhile.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from shardwise.errors import UserError, near_path, os_errors
from shardwise.report.json_lines import JsonLines
from shardwise.report.rank_timelines import RankTimelines
from shardwise.report.strict_json import strict
from shardwise.small_files import json_object, json_object_in

ERRORS = "errors"
"""Folder of a run in which ranks that failed leave their tracebacks."""
COMPANIONS = "base"
"""Folder of a run with the files beside the tokenizer that it started from."""
LOCK = ".lock"
"""File of a run that is there while it is being written; it says by which process."""
OFFLOADED = "offload"
"""Folder of state that is offloaded to disk, while the run is going."""


class RunDirectory:
    """A run on disk. Make one with `create` or `open`; close it, or use it in a `with` block, after appending."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports = path / "reports"
        """Directory of the run's step reports."""
        self.checkpoints = path / "checkpoints"
        self.events_path, self.updates_path = path / "events.jsonl", path / "updates.jsonl"
        self.timelines_path = self.reports / "timelines.json"
        """File of the timelines of all ranks in the step after the measured one."""
        self.last_timelines_path = self.reports / "timelines-last.json"
        """File of those of the last step."""
        self.memory, self.memory_snapshot = self.reports / "memory.json", self.reports / "memory.pickle"
        """Files of the memory of one rank of each kind over the measured step; rank 0's for pytorch.org/memory_viz."""
        self.trace = self.reports / "trace.json"
        """File of the trace of the measured report's timelines."""
        self._file = path / "run.json"
        self.writing_s = 0.0
        """CPU seconds that this process has spent on writing events and timelines: what a run costs for being
        followed while it continues."""
        self._events, self._updates = JsonLines(self.events_path), JsonLines(self.updates_path)

    @classmethod
    def create(cls, path: Path | str, run: Mapping[str, Any], resume: bool = False) -> "RunDirectory":
        """Start a run with the contents of its run.json; missing parents are made.

        resume: continue a run that is there already, keeping its run.json but for the fields that `run` gives.
        Raises `UserError` when `path` holds anything and `resume` is off, and when it cannot be written.
        """
        path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            here = cls(path)
            if occupied(path):
                if not here._file.exists():
                    raise UserError(f"{path} is not empty and holds no run: choose another --out")
                if not resume:
                    raise UserError(
                        f"{path} already holds a run; nothing was overwritten: choose another --out, or pass --resume"
                    )
                here.update(**run)
            else:
                here._write(dict(run))
            here.reports.mkdir(exist_ok=True)
            here.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            reason = (
                "it is not a directory" if isinstance(error, (FileExistsError, NotADirectoryError)) else error.strerror
            )
            raise UserError(f"cannot make run directory {path}: {reason}; choose another --out") from None
        return here

    @classmethod
    def open(cls, path: Path | str) -> "RunDirectory":
        """A run that exists. Raises `UserError` when `path` holds none."""
        here = cls(Path(path))
        if not here._file.is_file():
            raise UserError(f"{path} holds no run: it has no run.json{near_path(path)}")
        return here

    @property
    def run(self) -> dict[str, Any]:
        """The contents of run.json. Raises `UserError` when it is damaged."""
        with os_errors(f"read {self._file}"):
            data = json_object(self._file.read_bytes())
        if data is None:
            raise UserError(f"{self._file} is damaged: it is not a JSON object")
        return data

    def update(self, **fields: Any) -> None:
        """Replace fields of run.json (`status="finished"`), whole or not at all. Raises `UserError` if it cannot."""
        with os_errors(f"write {self._file}"):
            self._write(self.run | fields)

    def report(self, name: str) -> Path:
        return self.reports / f"{name}.json"

    @property
    def result(self) -> dict[str, Any]:
        """Result of an ended run (result.json); empty for any other."""
        return json_object_in(self.path / "result.json")

    def append(self, event: Mapping[str, Any]) -> None:
        """Append one event, as `JsonLines.append`. Raises `UserError` if it cannot."""
        began = time.thread_time()
        self._events.append(event)
        self.writing_s += time.thread_time() - began

    def timelines(self) -> dict[int, RankTimelines]:
        """Number of each step that is recorded on all ranks -> its timelines. Raises `UserError` for damaged files."""
        paths = (self.timelines_path, self.last_timelines_path)
        recorded = [RankTimelines.read(path) for path in paths if path.is_file()]
        return {one.step: one for one in recorded}

    def write_timelines(self, timelines: RankTimelines, last: bool = False) -> None:
        """Write a step of all ranks. Raises `UserError` if it cannot."""
        began = time.thread_time()
        timelines.write(self.last_timelines_path if last else self.timelines_path)
        self.writing_s += time.thread_time() - began

    def append_updates(self, part: Mapping[str, Any]) -> None:
        """Append a part of the record of updates of parameter servers. Raises `UserError` if it cannot."""
        began = time.thread_time()
        self._updates.append(part)
        self.writing_s += time.thread_time() - began

    def updates(self) -> Iterator[dict[str, Any]]:
        """The parts of the record of updates; none of a run without parameter servers. Raises `UserError` when one is
        damaged."""
        return (part for _, part in self._updates.items())

    def events(self, after: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """(cursor, event) of each whole event after a cursor, as `JsonLines.items`."""
        return self._events.items(after)

    def close(self) -> None:
        self._events.close()
        self._updates.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, data: dict[str, Any]) -> None:
        partial = self.path / "run.json.partial"
        with partial.open("w") as file:
            file.write(json.dumps(strict(data), indent=1, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._file)


def occupied(path: Path) -> bool:
    """Whether a folder holds anything but what a run that failed before it began may leave: its tracebacks, its lock,
    and files for offloaded state."""
    return any(entry.name not in (ERRORS, LOCK, OFFLOADED) for entry in path.iterdir())


def next_free(base: Path | str) -> Path:
    """The next unused directory of a series: runs/demo gives runs/demo-1, then runs/demo-2, above all that exist.

    Raises `UserError` when the parent directory cannot be listed.
    """
    base = Path(base)
    pattern = re.compile(re.escape(base.name) + r"-(\d+)", re.ASCII)
    taken: list[int] = []
    with os_errors(f"list {base.parent}"), contextlib.suppress(FileNotFoundError):
        taken = [int(m[1]) for p in base.parent.iterdir() if (m := pattern.fullmatch(p.name))]
    return base.with_name(f"{base.name}-{max(taken, default=0) + 1}")


def make_next(base: Path | str) -> Path:
    """Make the next unused directory of a series: no other process gets the same one.

    Raises `UserError` as `next_free`, and `OSError` when it cannot be made.
    """
    while True:
        path = next_free(base)
        with contextlib.suppress(FileExistsError):  # another process was faster
            path.mkdir(parents=True)
            return path
