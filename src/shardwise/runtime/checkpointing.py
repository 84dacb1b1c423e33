"""Saving and restoring a program: from flat intervals to pieces on disk and back, whatever layout wrote them.

Every rank writes its own part; records of the parts travel to rank 0 over a process group of their own, so that an
asynchronous save never meets the training's collectives; rank 0 writes the manifest last.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint import (
    Checkpoint,
    Entry,
    Held,
    Manifest,
    PartRecord,
    TensorSpec,
    commit,
    keep_last,
    needs,
    shapes,
    write_part,
    writes,
)
from shardwise.errors import UserError
from shardwise.runtime.step import Program

KINDS = ("model", "first", "second")
"""Stored tensors of each parameter: its (master) weights and AdamW's two moments."""


@dataclass(frozen=True)
class Position:
    """Where a run stands: training steps done, sequences seen, updates made."""

    step: int
    samples: int
    optimizer_steps: int


class Saver:
    """Writes a program's checkpoints into `folder`/step-N. Every rank of the job makes one.

    keep: whole checkpoints to keep, 0 for all. later: training goes on while a copy of the state is being written; at
    most one save is under way. seed, about: as in `Manifest`. Errors of a save under way are raised by the next `save`
    or by `finish`: `UserError` for what the disk refuses.
    """

    def __init__(
        self,
        program: Program,
        folder: Path,
        *,
        seed: int,
        about: dict[str, Any],
        keep: int,
        later: bool,
        timeout: float,
    ) -> None:
        self.program, self.folder, self.seed, self.about = program, folder, seed, about
        self.keep, self.later = keep, later
        self.rank = dist.get_rank()
        plan = program.plan
        self.writes = writes(plan.model, plan.layout, self.rank)
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, position: Position) -> None:
        """Write the state after `position.step` steps, or start to."""
        self.finish()
        entries, tensors = self._entries()
        if not self.later:
            self._write(position, entries, tensors)
            return
        copies = [tensor.clone() for tensor in tensors]
        self._thread = threading.Thread(target=self._guarded, args=(position, entries, copies), name="save")
        self._thread.start()

    def finish(self) -> None:
        """Wait for the save under way; raises what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _guarded(self, *args: Any) -> None:
        try:
            self._write(*args)
        except BaseException as error:
            self._error = error

    def _entries(self) -> tuple[list[Entry], list[Tensor]]:
        """What this rank writes, and the runs of its state that hold it, padding included."""
        states = {state.flat.unit.name: state for state in self.program.optimizer.states}
        entries, tensors = [], []
        for kind in KINDS:
            for held in self.writes:
                state = states[held.unit]
                source = {"model": state.master, "first": state.first, "second": state.second}[kind]
                run = source[held.start - state.flat.start : held.stop - state.flat.start]
                spec = TensorSpec(shape=held.shape, dtype=str(run.dtype).removeprefix("torch."))
                entries.append(Entry(f"{kind}/{held.name}", spec, held.stored))
                tensors.append(run)
        return entries, tensors

    def _write(self, position: Position, entries: list[Entry], tensors: list[Tensor]) -> None:
        folder = self.folder / f"step-{position.step}"
        held = [*self.writes] * len(KINDS)
        arrays = (_array(h, tensor) for h, tensor in zip(held, tensors, strict=True))
        outcome: PartRecord | str
        try:
            outcome = write_part(folder, self.rank, entries, arrays)
        except UserError as error:
            outcome = str(error)
        # Whoever failed must say so: the others wait for its record.
        outcomes: list[Any] | None = [None] * dist.get_world_size() if self.rank == 0 else None
        dist.gather_object(outcome, outcomes, group=self._control)
        verdict = [self._commit(folder, outcomes, position) if outcomes is not None else None]
        dist.broadcast_object_list(verdict, src=0, group=self._control)
        if verdict[0] is not None:
            raise UserError(verdict[0])

    def _commit(self, folder: Path, outcomes: list[PartRecord | str], position: Position) -> str | None:
        """Write the manifest when every rank has written its part; what went wrong otherwise."""
        if failures := [outcome for outcome in outcomes if isinstance(outcome, str)]:
            return failures[0]
        try:
            manifest = Manifest.of(
                [outcome for outcome in outcomes if not isinstance(outcome, str)],
                step=position.step,
                samples=position.samples,
                seed=self.seed,
                optimizer_steps=position.optimizer_steps,
                about=self.about,
            )
            commit(folder, manifest)
            if self.keep:
                keep_last(self.folder, self.keep)
        except UserError as error:
            return str(error)
        return None


def _array(held: Held, tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(held.without_padding(tensor.detach().cpu().numpy()))


def restore(program: Program, checkpoint: Checkpoint) -> Position:
    """Set weights, moments and the update count from a checkpoint, reading only what this rank holds.

    Raises `UserError` when it is of another model, or damaged.
    """
    plan = program.plan
    checkpoint.require(shapes(plan.model, KINDS))
    states = {state.flat.unit.name: state for state in program.optimizer.states}
    for held in needs(plan.model, plan.layout, dist.get_rank()):
        state = states[held.unit]
        for kind, target in (("model", state.master), ("first", state.first), ("second", state.second)):
            dtype = str(target.dtype).removeprefix("torch.")
            values = checkpoint.read(f"{kind}/{held.name}", held.local, dtype)
            target[held.start - state.flat.start : held.stop - state.flat.start].copy_(torch.from_numpy(values))
    for state in program.optimizer.states:
        if state.master is not state.flat.interval:
            state.flat.interval.copy_(state.master)
    manifest = checkpoint.manifest
    program.optimizer.steps = manifest.optimizer_steps
    program.engine.publish()
    return Position(manifest.step, manifest.samples, manifest.optimizer_steps)
