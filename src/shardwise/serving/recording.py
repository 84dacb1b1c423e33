"""Records of every engine step: ranks note it as they go, and reports are made of the notes at the end.

A rank writes one line of JSON a step; whoever started the ranks joins those of a step to a `StepReport`, with roles as
in training. Imports no torch.

The bubble of a prompt that goes through the stages in chunks: as the engine had it, and as it is simulated.

Measured from the notes that ranks take of their steps. A stage works from when it has what a step needs until it has
handed on what comes of it, its part of the scheduling included; it stands still while it waits for a message, before
its first chunk, and after its last one. Imports no torch.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.codec import Json
from shardwise.layout import Mesh
from shardwise.layout.axes import DP
from shardwise.layout.serving import replicas_in_step
from shardwise.report.step_report import Bytes, LedgerRow, Phase, Role, StepReport, TransportRow, merge_roles
from shardwise.schedule.pipeline import build
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times
from shardwise.serving.job import ServingJob


@dataclass(frozen=True)
class StepRecord(Json):
    """One engine step on one rank. tokens: computed ones; rows: their subset with logits. kv_bytes:
    of keys and values that sequences had in the cache after it. seconds: from beginning to end. began: seconds of the
    host's monotonic clock."""

    turn: int
    phase: Phase
    tokens: int
    rows: int
    seconds: float
    began: float
    kv_bytes: int
    bytes: Bytes
    ledger: tuple[LedgerRow, ...]
    transport: tuple[TransportRow, ...]

    @property
    def ended(self) -> float:
        """By the same clock."""
        return self.began + self.seconds

    @property
    def waited(self) -> float:
        """Seconds in which the rank stood still for others."""
        return sum(row.wait_s or 0.0 for row in self.transport)


def notes_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


def reports(job: ServingJob, folder: Path) -> Iterator[tuple[str, StepReport]]:
    """(name, report) of every engine step, from the notes that the ranks have left in a folder.

    Replicas that are not in step take steps of their own: names begin with the number of the first of those in step
    where there are several.
    """
    mesh = Mesh.of(job.layout, job.model)
    together: dict[int, list[int]] = {}
    for rank in range(job.layout.ranks):
        replica = mesh.index(DP, rank)
        together.setdefault(replica - replica % replicas_in_step(job.layout), []).append(rank)
    for replica, ranks in together.items():
        for number, found in _steps({rank: {n.turn: n for n in read_notes(folder, rank)} for rank in ranks}):
            phase = "prefill" if any(note.phase == "prefill" for note in found.values()) else "decode"
            name = f"turn-{number:05}-{phase}"
            yield f"replica-{replica}-{name}" if len(together) > 1 else name, _report(job, phase, found)


def _steps(notes: dict[int, dict[int, StepRecord]]) -> Iterator[tuple[int, dict[int, StepRecord]]]:
    """(number, rank -> its note) of the steps that compute anything. What a step without tokens moves, in which the
    stages of a pipeline wait for tokens, belongs to the engine step before."""
    before: tuple[int, dict[int, StepRecord]] | None = None
    for number in sorted(set[int]().union(*notes.values())):
        found = {rank: theirs[number] for rank, theirs in notes.items() if number in theirs}
        if before is not None and not any(note.tokens for note in found.values()):
            before = before[0], {rank: _joined(note, found.get(rank)) for rank, note in before[1].items()}
            continue
        if before is not None:
            yield before
        before = number, found
    if before is not None:
        yield before


def _joined(note: StepRecord, further: StepRecord | None) -> StepRecord:
    """One engine step, and another one without tokens that followed."""
    if further is None:
        return note
    rows: dict[tuple[Any, ...], tuple[LedgerRow, TransportRow]] = {}
    for each in (note, further):
        for row, how in zip(each.ledger, each.transport, strict=True):
            row = replace(row, phase=note.phase)
            key = row.op, row.axes, row.unit, row.dtype, row.elements
            if key in rows:
                had, was = rows[key]
                row = replace(row, count=had.count + row.count)
                how = replace(how, time_s=_sum(was.time_s, how.time_s), wait_s=_sum(was.wait_s, how.wait_s))
            rows[key] = row, how
    pairs = sorted(rows.values(), key=lambda pair: pair[0])
    ledger, transport = tuple(row for row, _ in pairs), (replace(how, row=i) for i, (_, how) in enumerate(pairs))
    return replace(note, seconds=note.seconds + further.seconds, ledger=ledger, transport=tuple(transport))


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def read_notes(folder: Path, rank: int) -> list[StepRecord]:
    file = notes_file(folder, rank)
    return [StepRecord.from_json(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def _report(job: ServingJob, phase: str, notes: dict[int, StepRecord]) -> StepReport:
    first, mesh = notes[min(notes)], Mesh.of(job.layout, job.model)
    # Data ranks have tokens of their own, or all the same ones; ranks of one replica have the same.
    of_data = {mesh.index(DP, rank): note for rank, note in notes.items()} if job.replicas > 1 else {0: first}
    tokens, rows = (sum(getattr(note, name) for note in of_data.values()) for name in ("tokens", "rows"))
    cached = {rank: note.kv_bytes for rank, note in notes.items()}
    return StepReport(
        source="measured",
        model=job.model.to_json(),
        layout=str(job.layout),
        workload={"phase": phase, "turn": first.turn, "tokens": tokens, "rows": rows, "kv_bytes": cached},
        cluster=f"{job.layout.ranks}x{'CPU' if job.device == 'cpu' else 'GPU'}",
        roles=merge_roles(
            {r: Role(f"rank {r}", (r,), n.bytes, n.ledger, n.transport) for r, n in notes.items()}
        ),
        time=max(note.ended for note in notes.values()) - first.began,
        notes=("bytes: weights, buffers of gathered weights, and the whole cache, used or not",),
    )  # fmt: skip


@dataclass(frozen=True)
class Filled:
    """One prompt. chunks: of it. makespan: seconds from the first stage's first chunk to the last stage's last one.
    busy: seconds in which each stage works."""

    chunks: int
    makespan: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Idle time over ideal, as `schedule.pipeline.simulate` has it: (p - 1) / m for equal stages."""
        return (self.makespan * len(self.busy) - sum(self.busy)) / sum(self.busy)


def measured(job: ServingJob, folder: Path) -> list[Filled]:
    """Every prompt that a pipeline has read, one at a time, from the notes in a folder. The layout has one replica."""
    mesh = Mesh.of(job.layout, job.model)
    ranks = [mesh.rank(pp=stage) for stage in range(job.layout.pp)]
    stages = [list(_prompts(read_notes(folder, rank))) for rank in ranks]
    return [_filled(prompt) for prompt in zip(*stages, strict=True)]


def _prompts(notes: Sequence[StepRecord]) -> Iterator[list[StepRecord]]:
    """One stage's engine steps, prompt by prompt: logits are wanted of the last chunk of each."""
    found: list[StepRecord] = []
    for note in notes:
        if note.tokens:
            found.append(note)
        if note.rows:
            yield found
            found = []


def _filled(prompt: Sequence[list[StepRecord]]) -> Filled:
    """prompt: stage -> its engine steps."""
    busy = tuple(steps[-1].ended - steps[0].began - sum(step.waited for step in steps) for steps in prompt)
    return Filled(len(prompt[0]), prompt[-1][-1].ended - prompt[0][0].began, busy)


def median(found: Sequence[Filled]) -> Filled:
    """The one whose bubble is in the middle, the lower one of two."""
    middle = statistics.median_low(each.bubble for each in found)
    return next(each for each in found if each.bubble == middle)


def simulated(stages: int, chunks: int, seconds: float, hop: float) -> Filled:
    """The schedule `prefill`, where every stage takes `seconds` for a chunk and a message `hop`."""
    found = simulate(build("prefill", stages, chunks), Times.equal(stages, seconds, 0, 0).with_hop(hop))
    return Filled(chunks, found.makespan, found.busy)
