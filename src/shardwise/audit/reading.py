"""Recordings of ranks, as they are read from the lines that `recorder.py` writes. Those of other software: `files`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwise.audit.calls import Call
from shardwise.errors import UserError

RECORDINGS = "*-*.jsonl"
"""Files of a recording's folder, one per process."""


@dataclass(frozen=True)
class StepMark:
    """An optimizer step of one rank."""

    step: int
    """1, 2, ..."""
    time: float
    """Seconds of the clock."""
    bytes: Mapping[str, int] | None
    """Class -> bytes, of the steps that were measured."""
    passes: int = 0
    """Backward passes that the rank began before it."""


@dataclass(frozen=True)
class RankRecording:
    """What is known of one rank."""

    rank: int
    calls: tuple[Call, ...]
    world: int = 0
    pid: int = 0
    host: str = ""
    begin: float = 0.0
    steps: tuple[StepMark, ...] = ()
    model: tuple[str, int, dict[str, Any] | None, list[Any]] | None = None
    """(class, parameters of this rank, Hugging Face's configuration, [name, shape, dtype, trained,
    shape on this rank] of each)."""
    pipeline: tuple[str, int, int] | None = None
    """(class of torch's schedule, micro-batches, stages of this rank)."""
    exit: float | None = None
    """Seconds of the clock when Python ended, by itself or with an error."""
    error: tuple[float, str, str] | None = None
    """(seconds of the clock, text, file:line) of the exception that ended it."""
    died: float | None = None
    """Seconds of the clock when its process was seen to be gone."""
    position: tuple[float, str, str] | None = None
    """(seconds of the clock, file:line, innermost function) of a program that makes no call for a while."""
    zero: int | None = None
    """Stage that DeepSpeed's engine has."""
    stale: int = 0
    """Parameters that the optimizer has from before they were sharded."""
    lost: int = 0
    """Things that the recorder failed to note."""

    @property
    def repeats_reduction(self) -> bool:
        """Whether gradients of every micro-batch are reduced after its backward pass, as DeepSpeed's stage 2 does."""
        return (self.zero or 0) > 1

    @property
    def killed(self) -> bool:
        """Whether its process ended without leaving Python."""
        return self.died is not None and self.exit is None


@dataclass
class _Lines:
    groups: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    steps: list[StepMark] = field(default_factory=list)
    lost: int = 0

    def add(self, kind: str, items: list[Any]) -> None:
        match kind:
            case "rank":
                self.values |= dict(zip(("rank", "world", "pid", "host", "begin"), items, strict=False))
            case "group":
                self.groups[items[0]] = items[1], tuple(items[2])
            case "place":
                self.places[items[0]] = items[1]
            case "call":
                self.call(*items)
            case "end":
                self.calls[items[0]] = replace(self.calls[items[0]], end=items[1], state="completed")
            case "step":
                self.steps.append(StepMark(*items))
            case "model" | "pipeline":
                self.values[kind] = tuple(items)
            case "exit" | "stale" | "zero":
                self.values[kind] = items[0]
            case "error":
                self.values["error"] = tuple(items)
            case _:
                self.lost += 1

    def call(self, order: int, op: str, group: int, dtype: str, shape: list[int], *items: Any) -> None:
        inputs, outputs, peer, place, phase, engine, step, begin, passes = items
        comm, ranks = self.groups[group]
        self.values.pop("error", None)  # the program has caught it
        self.calls[order] = Call(
            self.values["rank"], order, op, ranks, dtype, tuple(shape), inputs, outputs, peer, self.places[place],
            phase, begin, None, "started", comm, engine, step, passes=passes,
        )  # fmt: skip


def _read(file: Path) -> RankRecording | None:
    lines = _Lines()
    for text in file.read_bytes().split(b"\n")[:-1]:  # what follows the last newline was cut off with the process
        try:
            kind, *items = json.loads(text)
            lines.add(kind, items)
        except (ValueError, TypeError, KeyError, IndexError):
            raise UserError(f"{file} is damaged, or of another version of shardwise: record it again") from None
    if not lines.values:
        return None
    now = file.with_suffix(".now")
    with suppress(OSError, ValueError):  # absent, or just being written
        lines.values["position"] = tuple(json.loads(now.read_text()))
    calls = tuple(call for _, call in sorted(lines.calls.items()))
    return RankRecording(calls=calls, steps=tuple(lines.steps), lost=lines.lost, **lines.values)


def read_folder(folder: Path, died: Mapping[int, float] | None = None) -> list[RankRecording]:
    """The newest recording of every rank, by rank. died: process id -> seconds of the clock when it was gone."""
    results: dict[int, RankRecording] = {}
    for file in sorted(folder.glob(RECORDINGS)):
        one = _read(file)
        if one is not None and (one.rank not in results or results[one.rank].begin < one.begin):
            results[one.rank] = replace(one, died=(died or {}).get(one.pid))
    return [results[rank] for rank in sorted(results)]
