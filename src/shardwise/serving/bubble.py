"""The bubble of a prompt that goes through the stages in chunks: as the engine had it, and as it is simulated.

Measured from the notes that ranks take of their turns. A stage works from when it has what a turn needs until it has
handed on what comes of it, its part of the scheduling included; it stands still while it waits for a message, before
its first chunk, and after its last one. Imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.layout import Mesh
from shardwise.schedule.pipeline import build
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times
from shardwise.serving.job import ServingJob
from shardwise.serving.recording import StepRecord, read_notes


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
    """One stage's turns, prompt by prompt: the last chunk of each is the one of which logits are wanted."""
    found: list[StepRecord] = []
    for note in notes:
        if note.tokens:
            found.append(note)
        if note.rows:
            yield found
            found = []


def _filled(prompt: Sequence[list[StepRecord]]) -> Filled:
    """prompt: stage -> its turns."""
    busy = tuple(turns[-1].ended - turns[0].began - sum(turn.waited for turn in turns) for turns in prompt)
    return Filled(len(prompt[0]), prompt[-1][-1].ended - prompt[0][0].began, busy)


def median(found: Sequence[Filled]) -> Filled:
    """The one whose bubble is in the middle, the lower one of two."""
    middle = statistics.median_low(each.bubble for each in found)
    return next(each for each in found if each.bubble == middle)


def simulated(stages: int, chunks: int, seconds: float, hop: float) -> Filled:
    """The schedule `prefill`, where every stage takes `seconds` for a chunk and a message `hop`."""
    found = simulate(build("prefill", stages, chunks), Times.equal(stages, seconds, 0, 0).with_hop(hop))
    return Filled(chunks, found.makespan, found.busy)
