"""Memory of a rank over one measured step: bytes by class, the moment of the peak, and what was there then.

The snapshot is in the format of `torch.cuda.memory._snapshot` (docs.pytorch.org, "Understanding CUDA Memory Usage"),
which pytorch.org/memory_viz draws.
"""

import json
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.codec import Json
from shardwise.errors import os_errors
from shardwise.report.files import write_whole
from shardwise.report.palette import BYTE_CLASSES

CLASSES = tuple(BYTE_CLASSES)
MOST_POINTS, MOST_TENSORS, MOST_EVENTS = 400, 24, 200_000
"""Points of a curve, rows of tensors at the peak, and events of a snapshot."""
ALLOC, FREE, SAVED, UNSAVED, ENGINE, PART = "alloc", "free", "saved", "unsaved", "engine", "part"


class StorageEvent(NamedTuple):
    """Something that happened in a measured step.

    at: nanoseconds since it began. what: a storage was made or freed, became or ceased to be one that backward needs,
    the engine's buffers of a class (`words`) grew by `size`, or a part of the step (`words`) began. key: the storage.
    words: of a storage, its operation, type and shape.
    """

    at: int
    what: str
    key: int
    size: int
    words: str


@dataclass(frozen=True)
class PeakTensors(Json):
    """Storages of one class, operation, type and shape at the peak."""

    byte_class: str
    what: str
    count: int
    bytes: int


@dataclass(frozen=True)
class StepMemory(Json):
    """step: its number. seconds: of the step, which following every storage makes slow. at, bytes: the curve, and its
    bytes by `CLASSES`. peak_at, during: when the peak was, and in which part of the step. peak: its bytes by class."""

    rank: int
    step: int
    seconds: float
    at: tuple[float, ...]
    bytes: dict[str, list[int]]
    peak_at: float
    during: str
    peak: dict[str, int]
    tensors: tuple[PeakTensors, ...]


class _Live:
    """Bytes by class while events are replayed."""

    def __init__(self, lasting: Mapping[str, int]) -> None:
        self.now = Counter(lasting)
        self.storages: dict[int, tuple[int, str]] = {}
        self.saved: set[int] = set()
        self.part = "start of the step"

    def apply(self, event: StorageEvent) -> None:
        _, what, key, size, words = event
        if what == ENGINE:
            self.now[words] += size
        elif what == PART:
            self.part = words
        elif what == ALLOC:
            self.storages[key] = size, words
            self.now[self.byte_class(key)] += size
        elif key in self.storages:
            self.now[self.byte_class(key)] -= self.storages[key][0]
            if what == FREE:
                del self.storages[key]
                self.saved.discard(key)
                return
            (self.saved.add if what == SAVED else self.saved.discard)(key)
            self.now[self.byte_class(key)] += self.storages[key][0]

    def byte_class(self, key: int) -> str:
        return "saved" if key in self.saved else "other"


def step_memory(
    rank: int, step: int, events: Sequence[StorageEvent], lasting: Mapping[str, int], end: int
) -> StepMemory:
    """Replay a step. lasting: bytes of the classes that stay all the time. end: nanoseconds that the step took."""
    # Making ready to follow storages takes seconds.
    began = next((event.at for event in events if event.what == PART), 0)
    events = [event._replace(at=max(0, event.at - began)) for event in events]
    live, totals, curve = _Live(lasting), [], []
    for event in events:
        live.apply(event)
        totals.append(sum(live.now.values()))
        curve.append([live.now[name] for name in CLASSES])
    top = max(range(len(totals)), key=totals.__getitem__, default=-1)
    # Of as many stretches as the curve may have points, the highest point of each, the peak among them.
    long = -(-len(totals) // MOST_POINTS) or 1
    stretches = (range(start, min(len(totals), start + long)) for start in range(0, len(totals), long))
    chosen = sorted({top} & {*range(len(totals))} | {max(each, key=totals.__getitem__) for each in stretches})
    peak = _Live(lasting)
    for event in events[: top + 1]:
        peak.apply(event)
    sizes_of: dict[tuple[str, str], list[int]] = {}
    for key, (size, words) in peak.storages.items():
        sizes_of.setdefault((peak.byte_class(key), words), []).append(size)
    tensors = [PeakTensors(*of, len(sizes), sum(sizes)) for of, sizes in sizes_of.items()]
    return StepMemory(
        rank,
        step,
        (end - began) / 1e9,
        tuple(events[i].at / 1e9 for i in chosen),
        {name: [curve[i][n] for i in chosen] for n, name in enumerate(CLASSES)},
        events[top].at / 1e9 if totals else 0.0,
        peak.part,
        {name: peak.now[name] for name in CLASSES},
        tuple(sorted(tensors, key=lambda one: -one.bytes)[:MOST_TENSORS]),
    )


def write_memory(path: Path, traces: Sequence[StepMemory]) -> None:
    """Write as JSON, whole or not at all. Raises `UserError` when the file cannot be written."""
    data = {"ranks": [one.to_json() for one in traces]}
    write_whole(path, json.dumps(data, separators=(",", ":")) + "\n", "memory trace")


def read_memory(path: Path) -> tuple[StepMemory, ...]:
    """What `write_memory` has written. Raises `UserError` naming the file where it is missing or damaged."""
    with os_errors(f"read memory trace {path}", damaged=f"{path} is damaged: it holds no memory trace"):
        return tuple(StepMemory.from_json(one) for one in json.loads(path.read_bytes())["ranks"])


def memory_snapshot(events: Sequence[StorageEvent]) -> dict[str, Any]:
    """The step's storages as a snapshot of torch's allocator. Without segments, since nothing tells them here."""
    trace: list[dict[str, Any]] = []
    sizes: dict[int, int] = {}
    part = ""
    for at, what, key, size, words in events:
        if what == PART:
            part = words
        elif what == ALLOC:
            sizes[key] = size
            frames = [{"name": name, "filename": "", "line": 0} for name in (words, part) if name]
            trace.append(_entry(ALLOC, key, size, at, frames))
        elif what == FREE and key in sizes:
            trace += [_entry(f"free_{done}", key, sizes[key], at, []) for done in ("requested", "completed")]
            del sizes[key]
    return {"segments": [], "device_traces": [trace], "allocator_settings": {}}


def _entry(action: str, key: int, size: int, at: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": key, "size": size, "stream": 0, "time_us": at // 1000, "frames": frames}


def write_snapshot(path: Path, events: Sequence[StorageEvent]) -> None:
    """Write the snapshot, as long as it is not too long. Raises `UserError` when the file cannot be written."""
    if len(events) <= MOST_EVENTS:
        with os_errors(f"write memory snapshot {path}"):
            path.write_bytes(pickle.dumps(memory_snapshot(events), protocol=4))
