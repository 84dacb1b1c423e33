"""What ranks run for the tests of resuming: train on sampled text, save, go on from a checkpoint of any layout."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from harness.jobs import build
from harness.reference import SEED, Case, step_key
from shardwise.checkpoint import Checkpoint
from shardwise.data import Sampler
from shardwise.layout import Layout, Mesh
from shardwise.layout.axes import DP, REPLICA
from shardwise.runtime.checkpointing import Position, Saver, restore
from shardwise.runtime.job.batches import Batches
from shardwise.runtime.sync.outer_step import Rounds
from shardwise.runtime.zero.optimizer import learning_rate

TOKENS = 5000
STEPS = 8
"""By which the learning rate is planned, and the last step of most runs."""


@dataclass
class Trained:
    """losses: one a step. samples: for each step, the global indices that this rank's data rank took, in order."""

    losses: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)


def straight(rank: int, payload: tuple[Case, Layout, str | None, int, int]) -> Trained:
    """Train. Payload: case, layout, folder of checkpoints or None, the step after which to save, and the last step.

    The same state is saved once more, into `folder`-later, in the background: what was copied is written only when
    training has ended.
    """
    case, layout, folder, save_at, until = payload
    runner = _Runner(case, layout, rank)
    runner.train(save_at)
    slow = None
    if folder is not None:
        runner.save(Saver, folder, later=False)
        slow = runner.save(_SlowSaver, f"{folder}-later", later=True)
    runner.train(until)
    if slow is not None:
        slow.go.set()
        slow.finish()
    runner.close()
    return runner.trained


def go_on(rank: int, payload: tuple[Case, Layout, list[tuple[str, str | None]], int]) -> list[Trained]:
    """For each (checkpoint, folder): load it, save it again into `folder` if there is one, and train up to a step."""
    case, layout, sources, until = payload
    found = []
    for source, folder in sources:
        runner = _Runner(case, layout, rank)
        runner.at = restore(runner.program, Checkpoint.open(source))
        if folder is not None:
            runner.save(Saver, folder, later=False)
        runner.train(until)
        runner.close()
        found.append(runner.trained)
    return found


def stops(rank: int, payload: tuple[Case, Layout, str | None, str, list[int]]) -> Trained:
    """Train from the start or from a checkpoint, and save after each of some steps. Payload: case, layout, checkpoint,
    folder, steps."""
    case, layout, source, folder, steps = payload
    runner = _Runner(case, layout, rank)
    if source is not None:
        runner.at = restore(runner.program, Checkpoint.open(source))
    for step in steps:
        runner.train(step)
        runner.save(Saver, folder, later=False)
    runner.close()
    return runner.trained


class _SlowSaver(Saver):
    """One that writes nothing before `go` is set."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.go = threading.Event()

    def _write(self, *args: Any) -> None:
        assert self.go.wait(60)
        super()._write(*args)


S = TypeVar("S", bound=Saver)


class _Runner:
    """What the trainer does, without processes, files of text, and a run directory."""

    def __init__(self, case: Case, layout: Layout, rank: int) -> None:
        self.case, self.trained, self.at = case, Trained(), Position(0, 0, 0)
        self.program = build(case, layout, rank)
        tokens = np.random.default_rng(3).integers(case.model.vocab, size=TOKENS).astype(np.uint16)
        sampler = Sampler(tokens, case.workload.seq, SEED)
        plain = sampler.batch

        def noted(indices: np.ndarray) -> dict[str, np.ndarray]:
            self.trained.samples[-1] += indices.tolist()
            return plain(indices)

        sampler.batch = noted  # type: ignore[method-assign, assignment]
        data_rank = Mesh.of(layout, case.model).index(REPLICA + DP, rank)
        self.batches = Batches(self.program.plan, sampler, data_rank, torch.device("cpu"))

    def train(self, until: int) -> None:
        count = self.case.workload.batch
        for step in range(self.at.step, until):
            self.trained.samples.append([])
            batches = self.batches.step(self.at.samples, count, step_key(step))
            agrees = Rounds.of(self.program.plan.layout, STEPS).ends(step)
            loss, _, _ = self.program.step(batches, learning_rate(self.case.optimizer, step, STEPS), agrees)
            self.trained.losses.append(loss)
            self.at = Position(step + 1, self.at.samples + count, self.program.optimizer.steps)

    def save(self, kind: type[S], folder: str, later: bool) -> S:
        saver = kind(
            self.program,
            Path(folder),
            seed=SEED,
            about={"model": self.program.plan.model.to_json()},
            keep=0,
            later=later,
            timeout=60.0,
        )
        saver.save(self.at)
        return saver

    def close(self) -> None:
        dist.barrier()
        self.program.comms.close()
