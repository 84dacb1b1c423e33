"""Saving and restoring a program: from flat intervals to pieces on disk and back, whatever layout wrote them.

Every rank writes its own part; records of the parts travel to rank 0 over a process group of their own, so that an
asynchronous save never meets the training's collectives; rank 0 writes the manifest last.

Training state of `sync=local` in a checkpoint: one value for all replicas, which training continues with.

Replicas have moments of their own, unless outer steps average them. A checkpoint has their mean, and to be the state
that training continues from, whether it is resumed or not, replicas take the mean for theirs when it is saved. Outer
momentum is one for all; what packed outer gradients have lost is stored as the mean of what each replica would add to
its next one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint import (
    Checkpoint,
    LocalInterval,
    Manifest,
    PartEntry,
    PartImage,
    PartRecord,
    TensorSpec,
    commit,
    keep_last,
    needs,
    remove_unfinished,
    shapes,
    write_part,
    writes,
)
from shardwise.checkpoint.geometry import Piece, full
from shardwise.checkpoint.huggingface import HuggingFaceWeights, PeftAdapters
from shardwise.checkpoint.manifest import NAME as MANIFEST
from shardwise.checkpoint.manifest import trained as is_trained
from shardwise.checkpoint.names import unwrapped
from shardwise.errors import NotFiniteError, UserError
from shardwise.layout.gradients import feeds_back
from shardwise.layout.outer import keeps_momentum, outer_residuals
from shardwise.layout.units import UnitPlan
from shardwise.model.adapters import is_scale
from shardwise.model.parameters import Parameter
from shardwise.runtime.job.launch import reason
from shardwise.runtime.job.pulse import Pulse
from shardwise.runtime.pipeline.program import StepProgram
from shardwise.runtime.residual_state import RESIDUAL, average_residuals, folded_residuals, restore_residuals
from shardwise.runtime.zero.flat_unit import BaseValues

MOMENTUM, ERROR = "outer", "outer_error"
"""Kinds of the stored tensors of each parameter: outer momentum, and what packed outer gradients have lost."""


def outer_kinds(plan: UnitPlan) -> dict[str, str]:
    """Kind -> dtype of what is stored for outer steps."""
    kinds = {MOMENTUM: plan.dtypes.master} if keeps_momentum(plan) else {}
    return kinds | ({ERROR: "float32"} if any(any(outer_residuals(plan, unit)) for unit in plan.units) else {})


def agree(program: StepProgram) -> None:
    """Give all replicas the mean of their moments and of their residuals. Weights they share already: this follows an
    outer step. All ranks call it together."""
    assert program.outer is not None
    if not program.outer.averaged:
        program.outer.average_moments()
    if feeds_back(program.plan):
        average_residuals(program)
    for unit in program.outer.units.values():
        if unit.packed is not None:
            unit.packed.restore(unit.packed.mean_error())


def outer_tensors(program: StepProgram) -> dict[str, dict[str, Tensor]]:
    """Kind -> unit -> the values of this rank's interval, after `agree`."""
    units = program.outer.units if program.outer is not None else {}
    return {
        MOMENTUM: {name: unit.momentum for name, unit in units.items() if unit.momentum is not None},
        ERROR: {name: unit.packed.first for name, unit in units.items() if unit.packed is not None},
    }


def restore_outer(program: StepProgram, checkpoint: Checkpoint, stored: set[str]) -> None:
    """Set outer state from a checkpoint whose weights are in place; what it has none of starts at zero. stored: the
    kinds that it has."""
    if program.outer is None:
        return
    for unit in program.outer.units.values():
        if unit.momentum is not None:
            unit.momentum.zero_()
        if unit.packed is not None:
            unit.packed.restore(None)
    for kind, tensors in outer_tensors(program).items():
        for held in needs(program.plan.subject, program.plan.layout, dist.get_rank()) if kind in stored else ():
            if (target := tensors.get(held.unit)) is not None:
                start = program.engine.units[held.unit].start
                dtype = outer_kinds(program.plan)[kind]
                values = checkpoint.read(f"{kind}/{unwrapped(held.name)}", held.local, dtype)
                target[held.start - start : held.stop - start].copy_(torch.from_numpy(values))


OTHERS = (RESIDUAL, MOMENTUM, ERROR)
"""Stored tensors that only some layouts have; others drop them."""


@dataclass(frozen=True)
class Position:
    """Progress of a run: training steps done, sequences seen, updates made."""

    step: int
    samples: int
    optimizer_steps: int


class Saver:
    """Writes a program's checkpoints into `folder`/step-N. Every rank of the job makes one.

    keep: whole checkpoints to keep, 0 for all; parts of saves that were cut off before are removed. later: training
    goes on while a copy of the state is being written; at most one save is under way. seed, about: as in `Manifest`.
    timeout: seconds that ranks wait for each other. pulse: where a save under way gives signs of life. others: whole
    tensors that this rank writes besides, by stored name.
    Errors of a save under way are raised by the next `save` or by `finish`, identically on every rank: `UserError` for
    errors of the disk, `NotFiniteError` for a state that is not finite. Nothing is left of that checkpoint then.
    """

    def __init__(
        self,
        program: StepProgram,
        folder: Path,
        *,
        seed: int,
        about: dict[str, Any],
        keep: int,
        later: bool,
        timeout: float,
        pulse: Pulse | None = None,
        others: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        assert not later or others is dict, "others are written at once"
        self._others = others
        self.program, self.folder, self.seed, self.about = program, folder, seed, about
        self.keep, self.later = keep, later
        self.pulse = (pulse or Pulse()) if later else program.comms.pulse
        self.rank = dist.get_rank()
        plan = program.plan
        self.writes = writes(plan.subject, plan.layout, self.rank)
        self._kinds = dict.fromkeys(plan.workload.states, plan.dtypes.master) | outer_kinds(plan)
        """Stored kind -> dtype."""
        if feeds_back(plan):
            self._kinds[RESIDUAL] = "float32"
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._image: PartImage | None = None
        self._whole: set[Path] = set()
        self.saved: Path | None = None
        """The newest checkpoint that is complete."""
        self.step = -1
        self._pool = ThreadPoolExecutor(1, "save")
        self._saving: Future[None] | None = None

    def save(self, position: Position) -> None:
        """Write the state after `position.step` steps, or start to. Replicas that train apart from each other continue
        with what is written: it must follow an outer step."""
        self.finish()
        # All ranks together, which a rank that cannot write must not miss.
        if self.program.outer is not None:
            agree(self.program)
        others = outer_tensors(self.program)
        others[RESIDUAL] = folded_residuals(self.program) if feeds_back(self.program.plan) else {}
        entries = [
            PartEntry(f"{kind}/{unwrapped(held.name)}", TensorSpec(shape=held.shape, dtype=dtype), held.stored)
            for kind, dtype in self._kinds.items()
            for held in self.writes
        ]
        tensors = self._tensors(others)
        if not self.later:
            whole = {name: tensor.detach().cpu() for name, tensor in self._others().items()}
            entries += [_whole_entry(name, tensor) for name, tensor in whole.items()]
            arrays = chain(map(_array, self._each(), tensors), map(_bits_of, whole.values()))
            self._write(position, entries, arrays)
            return
        # Kept from save to save: memory that is new costs more than what is copied into it.
        self._image = self._image or PartImage(entries)
        for held, array, tensor in zip(self._each(), self._image.arrays, tensors, strict=True):
            padded = held.stored.numel < held.local.numel
            torch.from_numpy(array).copy_(torch.from_numpy(_array(held, tensor)) if padded else tensor)
        self._saving = self._pool.submit(self._write, position, entries, self._image.arrays, self._image)
        self._saving.add_done_callback(lambda _: self.pulse.idle())

    def finish(self) -> None:
        """Wait for the save under way; raises what went wrong in it."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            self.program.comms.pulse.await_save()
            wait([saving])
            self.program.comms.pulse.work()
            saving.result()

    def _tensors(self, others: dict[str, dict[str, Tensor]]) -> Iterator[Tensor]:
        """The runs of its state that hold them, padding included, one after the other: they may be on disk."""
        states = {state.flat.unit.name: state for state in self.program.optimizer.states}
        for kind in self._kinds:
            for held in self.writes:
                state = states[held.unit]
                start, stop = held.start - state.flat.start, held.stop - state.flat.start
                if kind in others:
                    yield others[kind][held.unit][start:stop]
                else:
                    yield state.get(self.program.plan.workload.states.index(kind), start, stop)

    def _each(self) -> list[LocalInterval]:
        return [*self.writes] * len(self._kinds)

    def _write(
        self, position: Position, entries: list[PartEntry], arrays: Iterable[np.ndarray], image: PartImage | None = None
    ) -> None:
        folder = self.folder / f"step-{position.step}"
        self.pulse.step(position.step)
        self.pulse.work("the save of its part")
        outcome: PartRecord | str
        try:
            outcome = write_part(folder, self.rank, entries, self._told(arrays), image)
        except UserError as error:
            outcome = str(error)
        # Whoever failed must say so: the others wait for its record.
        outcomes: list[Any] | None = [None] * dist.get_world_size() if self.rank == 0 else None
        self._together("the gather of the saved parts", dist.gather_object, outcome, outcomes)
        self.pulse.work("the save of the manifest")
        verdict: list[UserError | None] = [self._commit(folder, outcomes, position) if outcomes is not None else None]
        self._together("the broadcast that all is saved", dist.broadcast_object_list, verdict, 0)
        if verdict[0] is not None:
            self._clear(folder, outcome, begun=not isinstance(verdict[0], NotFiniteError))
            # No rank continues, and reads or saves there again, while a peer still has a part to remove.
            self._together("the barrier after a save that failed", dist.barrier)
            raise verdict[0]
        self.saved, self.step = folder, position.step

    def _told(self, arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        found = iter(arrays)
        for held in self._each():
            self.pulse.work(f"the save of {held.name}")
            yield next(found)
        yield from found

    def _together(self, words: str, collective: Callable[..., object], *args: Any) -> None:
        """A collective of the saving ranks. Raises `RuntimeError` in words when a peer is lost in it."""
        self.pulse.wait(words)
        try:
            collective(*args, group=self._control)
        except RuntimeError as error:
            raise RuntimeError(f"lost a peer in {words} ({reason(error)})") from error
        self.pulse.work()

    def _clear(self, folder: Path, outcome: PartRecord | str, begun: bool) -> None:
        """Remove this rank's part of a checkpoint that never came to be: the disk may be full as it is. begun: whether
        its manifest may have been written."""
        if begun and (folder / MANIFEST).exists():
            return
        if isinstance(outcome, PartRecord):
            with suppress(OSError):
                (folder / outcome.part.name).unlink()
        # Whoever comes last finds it empty.
        with suppress(OSError):
            folder.rmdir()

    def _commit(self, folder: Path, outcomes: list[PartRecord | str], position: Position) -> UserError | None:
        """Write the manifest when every rank has written its part; what went wrong otherwise."""
        if failures := [outcome for outcome in outcomes if isinstance(outcome, str)]:
            return UserError(failures[0])
        records = [outcome for outcome in outcomes if not isinstance(outcome, str)]
        if bad := sorted({name for record in records for name in record.nonfinite if is_trained(name)}):
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            return NotFiniteError(f"{folder} was not saved: {bad[0]}{more} is not finite")
        try:
            manifest = Manifest.of(
                records,
                step=position.step,
                samples=position.samples,
                seed=self.seed,
                optimizer_steps=position.optimizer_steps,
                about=self.about,
            )
            commit(folder, manifest)
            if self.keep:
                self._whole.add(folder)
                keep_last(self.folder, self.keep, self._whole)
            else:
                remove_unfinished(self.folder)
        except UserError as error:
            return UserError(str(error))
        return None


def _whole_entry(name: str, tensor: Tensor) -> PartEntry:
    shape = tuple(tensor.shape)
    return PartEntry(name, TensorSpec(shape, str(tensor.dtype).removeprefix("torch.")), Piece.whole(full(shape)))


def _bits_of(tensor: Tensor) -> np.ndarray:
    plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    array = plain.contiguous().reshape(-1).numpy()
    return array.view(np.uint16) if tensor.dtype == torch.bfloat16 else array


def _array(held: LocalInterval, tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(held.without_padding(tensor.detach().cpu().numpy()))


def restore(
    program: StepProgram, checkpoint: Checkpoint, others: Mapping[str, tuple[int, ...]] | None = None
) -> Position:
    """Set weights, moments and the update count from a checkpoint, reading only what this rank holds. others: stored
    name -> shape of tensors that it may have besides, which are not read.

    Moments that the optimizer does not have are dropped. Residuals of error feedback and outer momentum are zero where
    it has none, and are dropped where the layout has no use for them. Raises `UserError` when it is of another model,
    damaged, or without the optimizer's moments.
    """
    stored = {name.partition("/")[0] for name in checkpoint.tensors}
    unused = [*checkpoint.unused_states(program.plan.workload.optimizer), *(kind for kind in OTHERS if kind in stored)]
    besides = {name: shape for name, shape in (others or {}).items() if name in checkpoint.tensors}
    _fill(program, checkpoint, program.plan.workload.states, unused, besides)
    restore_residuals(program, checkpoint if RESIDUAL in stored else None)
    restore_outer(program, checkpoint, stored)
    manifest = checkpoint.manifest
    program.optimizer.steps = manifest.optimizer_steps
    return Position(manifest.step, manifest.samples, manifest.optimizer_steps)


def start_from(program: StepProgram, weights: HuggingFaceWeights) -> None:
    """Set the weights of a program that has made no step, reading only what this rank holds: where some are frozen,
    these alone. Raises as `restore`."""
    plan = program.plan
    if not plan.blueprint.freezes:
        _fill(program, weights, ("model",))
        return
    weights.require(shapes(plan.subject, ("model",), frozen=True))
    for held in needs(plan.subject, plan.layout, dist.get_rank(), frozen=True):
        flat = program.engine.units[held.unit]
        if flat.unit.dtype or is_scale(held.name):
            continue
        program.comms.pulse.work(f"the reading of {held.name}")
        values = weights.read(f"model/{held.name}", held.local, plan.dtypes.master)
        flat.put(held.start - flat.start, torch.from_numpy(values))
    base = BaseValues(plan, partial(_whole_values, program, weights, {}))
    for flat in program.engine.units.values():
        if flat.unit.frozen:
            flat.fill_frozen(base, lambda p: bool(p.dtype) or is_scale(p.name))
    program.engine.all_gather_params()


def _whole_values(
    program: StepProgram, weights: HuggingFaceWeights, latest: dict[str, Tensor], parameter: Parameter, index: Tensor
) -> Tensor:
    """`Values` of a matrix, which is read whole: a base is quantized from the whole matrix. latest: keeps it."""
    if parameter.name not in latest:
        program.comms.pulse.work(f"the reading of {parameter.name}")
        latest.clear()
        latest[parameter.name] = torch.from_numpy(weights.read(f"model/{parameter.name}", dtype="float32"))
    return latest[parameter.name][index.cpu()].to(index.device, torch.float64)


def start_adapters(program: StepProgram, adapters: PeftAdapters) -> None:
    """Set the adapters of a program that has made no step. Raises as `restore`."""
    _fill(program, adapters, ("model",))


def _fill(
    program: StepProgram, source: Checkpoint | HuggingFaceWeights | PeftAdapters, kinds: Sequence[str],
    unused: Sequence[str] = (), besides: Mapping[str, tuple[int, ...]] | None = None,
) -> None:  # fmt: skip
    """Set weights and moments. kinds: the first of `Workload.states`. unused: stored kinds that are not read; besides:
    stored tensors that are not."""
    plan = program.plan
    trained = {unwrapped(name): shape for name, shape in shapes(plan.subject, (*kinds, *unused)).items()}
    source.require(trained | dict(besides or {}))
    states = {state.flat.unit.name: state for state in program.optimizer.states}
    for held in needs(plan.subject, plan.layout, dist.get_rank()):
        state = states[held.unit]
        for index, kind in enumerate(kinds):
            program.comms.pulse.work(f"the reading of {held.name}")
            values = source.read(f"{kind}/{unwrapped(held.name)}", held.local, plan.dtypes.master)
            state.put(index, held.start - state.flat.start, torch.from_numpy(values))
    if program.outer is not None:
        program.outer.rebase()
    program.engine.all_gather_params()
