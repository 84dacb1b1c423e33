"""One rank's file of offloaded state, read and written past the page cache where the file system allows it.

The page cache would hold what has been moved to disk in memory after all. Two threads read and write while the caller
computes: the calls release the interpreter's lock.

Resume from offloaded state on disk: a run whose process was killed loses no step that had ended.

Each rank's file has two slots, and an update writes the one that does not count. A rank begins an update only after a
sum over all ranks, the gradients' norm, and so only when all of them have committed the update before: the newest
update that every rank has committed is whole on all of them.
"""

import errno
import json
import os
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.file_io import memory, set_direct
from shardwise.errors import UserError
from shardwise.layout.gradients import feeds_back
from shardwise.layout.homes import BUFFERS, DISK_READ, DISK_WRITE, PAGE, SLOTS, Load, StateFile, paged, state_file
from shardwise.layout.units import UnitPlan
from shardwise.report.step_report import Bytes
from shardwise.report.units import format_bytes
from shardwise.runtime.transport.process_group import gather_objects

Update = Callable[[Load, list[Tensor]], object]
"""Change one load's arrays of state in place."""


class OffloadFile:
    """The file of `layout` in a folder that is made if need be.

    dtypes: of state, and of the parameters. keep: use the file that is there, with the states of its last steps; else
    it is made anew. Raises `UserError` when it cannot be made as long as it must be, or `keep` finds another one.
    """

    def __init__(
        self, path: Path, layout: StateFile, state: torch.dtype, parameters: torch.dtype, keep: bool = False
    ) -> None:
        self.path, self.layout, self._dtype, self._parameters = path, layout, state, parameters
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | (0 if keep else os.O_CREAT | os.O_TRUNC)
            self._file = os.open(path, flags, 0o600)
            if not keep:
                os.posix_fallocate(self._file, 0, layout.nbytes)
            elif os.fstat(self._file).st_size != layout.nbytes:
                raise UserError(f"{path} is the offloaded state of another layout: remove it, or give another folder")
        except OSError as error:
            if not keep:
                self._remove()
            raise UserError(
                f"cannot keep {format_bytes(layout.nbytes)} of offloaded state in {path}: {error.strerror}; "
                "choose another folder (--offload-dir)"
            ) from None
        self.direct = set_direct(self._file)
        """Whether the page cache is left out."""
        self.buffers = [pages(layout.buffer_bytes) for _ in range(BUFFERS if layout.buffer_bytes else 0)]
        """Whole pages [bytes], uint8, that loads go through."""
        self.kept = keep
        """Whether it holds the state of earlier steps."""
        self.slot = 0
        """The slot of the last step's state."""
        self.spans: defaultdict[tuple[tuple[str, str], str], list[tuple[int, int]]] = defaultdict(list)
        """(operation, unit) -> nanoseconds from and to which the last update read and wrote."""
        self.moved: Counter[tuple[tuple[str, str], str]] = Counter()
        """(operation, unit) -> elements that it has read and written."""
        self._reader, self._writer = (ThreadPoolExecutor(1, f"offload-{what}") for what in ("read", "write"))

    def _remove(self) -> None:
        """Remove the file, and its folder if it was the last one there."""
        with suppress(OSError):
            self.path.unlink()
        with suppress(OSError):
            self.path.parent.rmdir()

    # -- bytes

    def _move(self, call: Callable[..., int], buffer: memoryview, at: int, what: str) -> None:
        while len(buffer):
            try:
                count = call(buffer, at)
            except OSError as error:
                if self.direct and error.errno == errno.EINVAL:  # not every file system that takes the flag does it
                    self.direct = not set_direct(self._file, False)
                    continue
                raise UserError(f"cannot {what} offloaded state in {self.path}: {error.strerror}") from None
            if not count:
                raise UserError(f"{self.path} ends before its offloaded state does: it was changed while in use")
            buffer, at = buffer[count:], at + count

    def read(self, buffer: memoryview, at: int) -> None:
        """Fill whole pages of memory from a page of the file."""
        self._move(lambda part, start: os.preadv(self._file, [part], start), buffer, at, "read")

    def write(self, buffer: memoryview, at: int) -> None:
        """Write whole pages of memory at a page of the file."""
        self._move(lambda part, start: os.pwrite(self._file, part, start), buffer, at, "write")

    # -- one update

    def update(self, change: Update, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Change every load of the state, from the slot of the last step into the other one, which then is the last
        step's; on disk `commit` makes it so. Reading, changing and writing go on at the same time, each in another
        buffer. waiting: entered while it waits for the disk."""
        reads: list[Future[None]] = []
        writes: list[Future[None]] = []
        loads = list(self.layout.loads())
        self.spans.clear()
        self.moved.clear()
        for index, load in enumerate(loads):
            for ahead in range(len(reads), min(index + BUFFERS - 1, len(loads))):
                before = writes[ahead - BUFFERS] if ahead >= BUFFERS else None
                reads.append(self._reader.submit(self._read_load, loads[ahead], ahead % BUFFERS, before))
            with waiting():
                reads[index].result()
            change(load, self._arrays(load, index % BUFFERS))
            writes.append(self._writer.submit(self._write_load, load, index % BUFFERS))
        with waiting():
            for write in writes:
                write.result()
        self.slot = 1 - self.slot

    def _sections(self, load: Load, index: int, slot: int) -> list[tuple[memoryview, int]]:
        """(memory, byte of the file) of each array of a load."""
        length = paged((load.stop - load.start) * self.layout.width)
        view = _view(self.buffers[index])
        first = [self.layout.start(slot, load.unit, state) for state in range(self.layout.arrays)]
        at = load.start * self.layout.width
        return [(view[i * length : (i + 1) * length], start + at) for i, start in enumerate(first)]

    def _read_load(self, load: Load, index: int, before: Future[None] | None) -> None:
        if before is not None:
            before.result()
        with self._timed(DISK_READ, load.unit):
            for buffer, at in self._sections(load, index, self.slot):
                self.read(buffer, at)
                self.moved[DISK_READ, load.unit] += load.stop - load.start

    def _write_load(self, load: Load, index: int) -> None:
        with self._timed(DISK_WRITE, load.unit):
            for buffer, at in self._sections(load, index, 1 - self.slot):
                self.write(buffer, at)
                self.moved[DISK_WRITE, load.unit] += load.stop - load.start

    @contextmanager
    def _timed(self, op: tuple[str, str], unit: str) -> Iterator[None]:
        started = time.perf_counter_ns()
        yield
        self.spans[op, unit].append((started, time.perf_counter_ns()))

    def _arrays(self, load: Load, index: int) -> list[Tensor]:
        count = load.stop - load.start
        length = paged(count * self.layout.width)
        sections = self.buffers[index][: self.layout.arrays * length].view(self._dtype).chunk(self.layout.arrays)
        return [section[:count] for section in sections]

    # -- any piece

    def get(self, unit: str, state: int, start: int, stop: int) -> Tensor:
        """A copy of elements [start, stop) of one array of the last step's state."""
        return self._pages(self.layout.start(self.slot, unit, state), self._dtype, start, stop)[2]

    def put(self, unit: str, state: int, start: int, values: Tensor) -> None:
        """Change elements of one array of the last step's state, from `start` on."""
        self._put(self.layout.start(self.slot, unit, state), self._dtype, start, values)

    def put_parameters(self, unit: str, start: int, values: Tensor) -> None:
        self._put(self.layout.parameter_starts[unit], self._parameters, start, values)

    def _put(self, at: int, dtype: torch.dtype, start: int, values: Tensor) -> None:
        if not len(values):
            return
        view, byte, there = self._pages(at, dtype, start, start + len(values))
        there.copy_(values)
        self.write(view, byte)

    def _pages(self, at: int, dtype: torch.dtype, start: int, stop: int) -> tuple[memoryview, int, Tensor]:
        """The whole pages around elements of the array at a byte of the file: their memory, their first byte, and the
        elements in that memory."""
        width = dtype.itemsize
        first = start * width // PAGE * PAGE
        view = memoryview(memory(max(PAGE, paged(stop * width - first))))
        if start < stop:
            self.read(view, at + first)
        elements = torch.frombuffer(view, dtype=dtype, count=len(view) // width)
        return view, at + first, elements[start - first // width : stop - first // width]

    def start_reading(self, unit: str, buffer: Tensor) -> tuple[Future[tuple[int, int]], Tensor]:
        """Start to read a unit's parameters into `pages`. Returns what waits for it and then has the nanoseconds from
        and to which it ran, and where they will be."""
        elements = dict(self.layout.parameters)[unit]
        view = _view(buffer)[: paged(elements * self.layout.parameter_width)]
        reading = self._reader.submit(self._timed_read, view, self.layout.parameter_starts[unit])
        return reading, buffer.view(self._parameters)[:elements]

    def _timed_read(self, view: memoryview, at: int) -> tuple[int, int]:
        started = time.perf_counter_ns()
        self.read(view, at)
        return started, time.perf_counter_ns()

    # -- which slot counts

    def commit(self, about: dict[str, Any]) -> None:
        """The last step's state is whole from here on, even if the process is killed.

        about: what a later run must know of the step; its JSON must fit into a page.
        """
        os.fdatasync(self._file)
        text = json.dumps(about).encode()
        head = len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text
        assert len(head) <= PAGE, "the header of a slot is longer than a page"
        page = memory(PAGE)
        page[: len(head)] = head
        self.write(memoryview(page), self.slot * PAGE)
        os.fdatasync(self._file)

    def committed(self) -> dict[int, dict[str, Any]]:
        """Slot -> what `commit` was told of its state, for slots that hold a whole one."""
        found, page = {}, memory(PAGE)
        for slot in range(SLOTS):
            self.read(memoryview(page), slot * PAGE)
            length = int.from_bytes(page[:4], "little")
            text = page[8 : 8 + length]
            if 0 < length <= PAGE - 8 and zlib.crc32(text) == int.from_bytes(page[4:8], "little"):
                found[slot] = json.loads(text)
        return found

    def close(self, remove: bool = False) -> None:
        """Wait for what is under way, and close the file."""
        for pool in (self._reader, self._writer):
            pool.shutdown()
        os.close(self._file)
        if remove:
            self._remove()


def pages(nbytes: int) -> Tensor:
    """So many bytes of memory that begins at a page, as uint8 [nbytes]."""
    return torch.frombuffer(memory(max(nbytes, PAGE)), dtype=torch.uint8)


def _view(buffer: Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type]


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.state"


def offload_file(plan: UnitPlan, folder: Path | None, rank: int, slot: int | None = None) -> OffloadFile | None:
    """The file of a rank's offloaded state in a folder, made anew, or as it is with the state of `slot`; None where
    nothing is kept on disk. Raises `UserError` without a folder, and as `OffloadFile`."""
    if state_file(plan) is None:
        return None
    if folder is None:
        raise UserError(f"layout {plan.layout} keeps state on disk: name a folder for it (--offload-dir)")
    file = open_file(plan, file_of(folder, rank), keep=slot is not None)
    file.slot = slot or 0
    return file


def file_bytes(file: OffloadFile | None) -> Bytes:
    if file is None:
        return Bytes()
    return Bytes(parameters=file.layout.parameter_bytes, optimizer=file.layout.state_bytes)


def open_file(plan: UnitPlan, path: Path, keep: bool = True) -> OffloadFile:
    """A file for the state of a plan's rank. Raises as `OffloadFile`."""
    layout = state_file(plan)
    assert layout is not None
    state, parameters = getattr(torch, plan.dtypes.master), getattr(torch, plan.layout.dtype)
    return OffloadFile(path, layout, state, parameters, keep)


@dataclass(frozen=True)
class Kept:
    """State of a finished step in the files of all ranks."""

    slot: int
    """The slot of this rank's file that holds it."""
    about: dict[str, Any]
    """What was committed with it: its run, step, samples and updates."""


def newest_kept(plan: UnitPlan, folder: Path, rank: int, run: str, after: int, until: int | None = None) -> Kept | None:
    """The newest state of `run` that the files of all ranks hold, of a step later than `after`, and not later than
    `until` of any rank; None where there is none, or state is not on disk as a whole (a fraction of it is elsewhere, or
    residuals of packed gradients).

    All ranks of the job call this together. Every step of theirs must have a gradient norm.
    """
    layout = state_file(plan)
    if layout is None or plan.layout.offload != "nvme" or feeds_back(plan):
        return None
    mine: dict[int, Kept] = {}
    path = file_of(folder, rank)
    if path.exists():
        try:
            file = open_file(plan, path)
            mine = {
                about["step"]: Kept(slot, about)
                for slot, about in file.committed().items()
                if about.get("run") == run and after < about["step"] <= (about["step"] if until is None else until)
            }
            file.close()
        except (UserError, KeyError, TypeError, json.JSONDecodeError):
            mine = {}
    common = set.intersection(*map(set, gather_objects(set(mine))))
    return mine[max(common)] if common else None
