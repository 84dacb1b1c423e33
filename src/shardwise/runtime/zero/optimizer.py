"""The optimizer over flat intervals, with a gradient norm that counts every parameter of the whole model once.

Each rank updates the interval that it owns. Weight decay and replication are spans of the interval, so the update is a
handful of fused calls, whatever the number of parameters. bf16 weights have fp32 masters: here, or, at stage 3, as the
engine's own intervals.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.layout.gradients import norm_over
from shardwise.layout.homes import (
    DISK_WRITE,
    TO_DEVICE,
    TO_HOST,
    Load,
    accumulates_on_host,
    gradient_chunk,
    is_master,
    offloaded,
)
from shardwise.layout.unit import Span
from shardwise.ops.limits import optimizer_chunk
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.job.config import learning_rate as learning_rate
from shardwise.runtime.offload.file import OffloadFile
from shardwise.runtime.offload.state import MASTER, FileState, MemoryState, OptimizerState
from shardwise.runtime.transport.comms import Comms, waiting_for_disk
from shardwise.runtime.zero.engine import Engine
from shardwise.runtime.zero.flat_unit import HOST, BaseValues, FlatUnit, Values, torch_dtype
from shardwise.runtime.zero.update import divides, update


class UnitState:
    """Optimizer state of one unit's interval. It stays on the device up to element `cut`, and is in the host's memory
    or in `file` from there on."""

    def __init__(self, flat: FlatUnit, values: Values, file: OffloadFile | None) -> None:
        initial, self.flat = flat.fill(values), flat
        self.cut = len(initial) - offloaded(flat.plan, flat.unit)
        moments = len(flat.plan.workload.states) - 1
        self.here: list[MemoryState] = []
        """On the device."""
        self.away: list[OptimizerState] = []
        """Off it."""
        if self.cut:
            engines = is_master(flat.plan)
            master = flat.interval if engines else initial if self.cut == len(initial) else initial[: self.cut].clone()
            self.here = [MemoryState(0, master[: self.cut], moments, engines)]
        if self.cut < len(initial):
            master = initial[self.cut :]
            on_disk = flat.plan.layout.offload_home == "nvme"
            state: OptimizerState = MemoryState(self.cut, master.to(HOST, copy=True), moments, engines=False)
            if on_disk:
                assert file is not None
                state = FileState(file, flat.unit.name, self.cut, master)
            self.away = [state]
        inside = (span.within(flat.start, flat.stop) for span in flat.unit.spans)
        self.spans: list[Span] = [span for span in inside if span is not None]

    def updated(self, idle: Collection[str], missed: Mapping[str, int]) -> Iterator[tuple[Span, int]]:
        """(span of the interval that is updated now, updates that it has missed). idle: parameters without a gradient
        in this step; missed: parameter -> updates."""
        if not idle and not missed:
            yield from ((span, 0) for span in self.spans)
            return
        for start, placed in zip(self.flat.unit.offsets, self.flat.unit.placed, strict=True):
            first = start - self.flat.start
            for span in self.spans if placed.name not in idle else ():
                a, b = max(first, span.start), min(first + placed.numel, span.stop)
                if a < b:
                    yield replace(span, start=a, stop=b), missed.get(placed.name, 0)

    def get(self, kind: int, start: int, stop: int) -> Tensor:
        """Elements of the interval of one of `Workload.states`, not to be changed."""
        pieces = [
            run.get(kind, max(start, run.start), min(stop, run.stop))
            for run in (*self.here, *self.away)
            if max(start, run.start) < min(stop, run.stop)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat([piece.to(HOST) for piece in pieces])

    def put(self, kind: int, start: int, values: Tensor) -> None:
        """Change elements of the interval, from `start` on; master weights become the unit's weights, too."""
        for run in (*self.here, *self.away):
            a, b = max(start, run.start), min(start + len(values), run.stop)
            if a < b:
                run.put(kind, a, values[a - start : b - start])
        if kind == MASTER:
            self.flat.put(start, values)

    @property
    def master(self) -> Tensor:
        """All master weights, not to be changed."""
        return self.get(MASTER, 0, self.flat.stop - self.flat.start)


class Optimizer:
    """The update of everything that `engine` holds. Creating it sets the parameters to `values`.

    looks_at_norm: compute the gradients' norm even where nothing is clipped by it. It costs a pass over the gradients,
    which trainers that do not clip leave out.
    """

    def __init__(self, engine: Engine, comms: Comms, config: OptimizerConfig, values: Values) -> None:
        self.engine, self.comms, self.config = engine, comms, config
        self.kind = engine.plan.workload.optimizer
        values = BaseValues(engine.plan, values)
        self.states = [UnitState(flat, values, engine.file) for flat in engine.trained]
        for flat in engine.units.values():
            if flat.unit.frozen:
                flat.fill_frozen(values)
        self._by_unit = {state.flat.unit.name: state for state in self.states}
        self.about: dict[str, Any] = {}
        """What a later run must know of the step under way, beside the number of updates."""
        self.looks_at_norm = True
        self._loss = 0.0
        self.skipped = False
        """Whether the last step left everything as it was, because its loss or its gradients were not finite."""
        self.steps = 0
        self.idle: Collection[str] = ()
        """Parameters without a gradient on any rank in this step. They are left alone, as torch's optimizers do."""
        self.missed: Counter[str] = Counter()
        """Parameter -> updates that left it alone: its own number of updates, by which AdamW corrects moments, is lower
        by so many."""
        self._device = engine.device
        self._steps = {device.type: torch.zeros((), device=device) for device in {self._device, HOST}}
        """Number of the update, on each device that updates."""
        self._divisor = torch.ones((), device=self._device)
        """Divisor of gradients that are clipped in the update's own kernel."""
        self._gradient = torch.empty(gradient_chunk(engine.plan), dtype=torch_dtype(engine.plan.dtypes.master))
        """A chunk of offloaded gradients, converted and clipped."""
        self._sums_on_host = accumulates_on_host(engine.plan)
        self._moved: Counter[tuple[str, tuple[str, str], str, torch.dtype]] = Counter()
        """(gradients, weights or state; copy, unit, dtype) -> elements that the update under way has moved."""
        for tensor in self.on_host():
            engine.host.add("optimizer", tensor.nbytes)
        engine.host.add("comm", self._gradient.nbytes)

    def tell(self, total: float, tokens: float) -> None:
        """Summed loss and valid tokens of the step's batch, the same on all ranks of a replica."""
        self._loss = total

    def step(self, lr: float) -> float:
        """Clip, update, and release the gradients; returns their global norm before clipping (L2, over the model), NaN
        where it is not needed. Where it or the step's loss is not finite, nothing is updated, on any rank of a
        replica: all of them see the same numbers."""
        self.comms.pulse.work("the optimizer")
        norm, coefficient, finite = math.nan, 1.0, math.isfinite(self._loss)
        if self.config.clip or self.looks_at_norm:
            with self.comms.in_phase("optimizer"):
                norm = gradient_norm(self.engine, self.comms, self.states)
            finite = finite and math.isfinite(norm)
        # Collectives that move no data leave memory as it was, which may hold anything.
        self.skipped = self.comms.moves_data and not finite
        if self.skipped:
            for state in self.states:
                state.flat.grads.free()
                if state.flat.residuals is not None:
                    state.flat.residuals.drop()
            return norm
        if self.config.clip:
            # torch.nn.utils.clip_grad_norm_'s own coefficient
            coefficient = min(1.0, self.config.clip / (norm + 1e-6))
        self.steps += 1
        for number in self._steps.values():
            number.fill_(self.steps)
        for state in self.states:
            for run in (*state.here, *state.away):
                if isinstance(run, MemoryState):
                    self._update(state, run.start, run.tensors, lr, coefficient, apart=not run.engines)
        if (file := self.engine.file) is not None:
            change = partial(self._update_load, lr=lr, coefficient=coefficient)
            file.update(change, partial(waiting_for_disk, self.comms))
        for state in self.states:
            state.flat.grads.free()
        self._enter_copies()
        self.missed.update(self.idle)
        return norm

    def _update_load(self, load: Load, arrays: list[Tensor], lr: float, coefficient: float) -> None:
        state = self._by_unit[load.unit]
        self._update(state, state.cut + load.start, arrays, lr, coefficient)

    def _enter_copies(self) -> None:
        """Enter the copies of an update into the ledger, one for each unit and way."""
        if (file := self.engine.file) is not None:
            wide = torch_dtype(self.engine.plan.dtypes.master)
            for (op, unit), elements in file.moved.items():
                self._moved["state", op, unit, wide] += elements
        with self.comms.in_phase("optimizer"):
            for (what, op, unit, dtype), elements in self._moved.items():
                spans = file.spans[op, unit] if file is not None and what == "state" else ()
                self.comms.copied(op, unit, dtype, elements, spans)
        self._moved.clear()

    def use_kept(self, updates: int) -> None:
        """Continue after so many updates with the state that is on disk, which is all of it."""
        self.steps = updates
        for state in self.states:
            state.flat.put(0, state.master)

    def commit(self) -> None:
        """The step is over: its state on disk is what counts from here on."""
        if self.engine.file is not None and self.engine.file.buffers and not self.skipped:
            self.engine.file.commit({**self.about, "updates": self.steps})

    def _update(
        self, state: UnitState, start: int, tensors: Sequence[Tensor], lr: float, coefficient: float, apart: bool = True
    ) -> None:
        """Update elements of an interval, from `start` on. tensors: their master weights and moments; apart: the
        weights are not the engine's.

        One fused call a chunk: low-precision gradients and weights are converted while the cache holds them.
        """
        flat, stop = state.flat, start + len(tensors[0])
        self.comms.pulse.work(f"the optimizer for {flat.unit.name}")
        away = start >= state.cut
        low = flat.grads_interval.dtype != tensors[0].dtype or apart
        for span, missed in state.updated(self.idle, self.missed):
            part = span.within(start, stop)
            if part is None:
                continue
            step = part.stop - part.start
            if low and not tensors[0].is_cuda:
                step = len(self._gradient) if away else optimizer_chunk(len(flat.grads_interval))
            every = (flat.grads_interval[start:stop], *tensors)
            at = start + part.start
            for chunk in zip(*(each[part.start : part.stop].split(step) for each in every), strict=True):
                gradient, master, *moments = chunk
                own = gradient
                if gradient.dtype != master.dtype or gradient.device != master.device:
                    own = self._gradient[: len(master)].copy_(gradient) if away else gradient.to(master)
                divisor = None
                if coefficient < 1.0:
                    divisor = self._clip(own, coefficient)
                number = self._steps[master.device.type] - missed if missed else self._steps[master.device.type]
                update(self.kind, (master, own, *moments), number, self.config, lr, span.decay, divisor)
                if apart and flat.file is None:
                    flat.put(at, master)
                at += len(master)
                del own  # before the next one is made
        if flat.file is not None:
            flat.put(start, tensors[0])
        if self.engine.plan.layout.offload_home != "none":
            self._note_copies(flat, away, len(tensors[0]))

    def _clip(self, gradient: Tensor, coefficient: float) -> Tensor | None:
        """Scale a gradient, now or by the divisor that is returned for its update."""
        if divides(self.kind, gradient):
            return self._divisor.fill_(1 / coefficient if coefficient else math.inf)  # 0: the norm is infinite
        gradient.mul_(coefficient)
        return None

    def _note_copies(self, flat: FlatUnit, away: bool, elements: int) -> None:
        """Gradients have come to where their state is, and new weights have gone from there to where they are kept."""
        layout = self.engine.plan.layout
        name, dtype, stored = flat.unit.name, torch_dtype(layout.dtype), layout.offloads_params
        if away != self._sums_on_host:
            self._moved["gradients", TO_HOST if away else TO_DEVICE, name, flat.grads_interval.dtype] += elements
        if away != stored:
            self._moved["weights", TO_DEVICE if away else TO_HOST, name, dtype] += elements
        if flat.file is not None:
            self._moved["weights", DISK_WRITE, name, dtype] += elements

    def shift(self, unit: str, name: str, change: Tensor) -> None:
        """Add `change`, a vector that every rank has, to a parameter that no gradient moves."""
        state = self._by_unit[unit]
        for start, placed in zip(state.flat.unit.offsets, state.flat.unit.placed, strict=True):
            a, b = max(start, state.flat.start), min(start + placed.numel, state.flat.stop)
            if placed.name == name and a < b:
                first, last = a - state.flat.start, b - state.flat.start
                master = state.get(MASTER, first, last)
                state.put(MASTER, first, master + change[a - start : b - start].to(master))

    def owned(self) -> list[Tensor]:
        return [tensor for state in self.states for run in state.here for tensor in run.own]

    def on_host(self) -> list[Tensor]:
        runs = (run for state in self.states for run in state.away)
        return [tensor for run in runs if isinstance(run, MemoryState) for tensor in run.own]

    def buffers_on_host(self) -> list[Tensor]:
        return [self._gradient]


class HasGradient(Protocol):
    """State of one unit, as far as the norm of its gradient needs it."""

    flat: FlatUnit
    spans: list[Span]


def gradient_norm(engine: Engine, comms: Comms, states: Sequence[HasGradient]) -> float:
    """Norm of all gradients (L2). Each value counts once: replicas over tp share it, intervals over the shard group and
    stages of the pipeline add up, and of a tied table at both ends the embedding's counts."""
    total = torch.zeros(1, dtype=torch.float64, device=engine.device)
    copied = "tied" if engine.plan.local.copies_table else None
    for state in states:
        if state.flat.unit.name == copied:
            continue
        grads = state.flat.grads_interval
        wide = torch.float32 if grads.dtype == torch.bfloat16 else grads.dtype
        for span in state.spans:
            part = torch.linalg.vector_norm(grads[span.start : span.stop], dtype=wide).double()
            total += (part * part / span.replicas).to(total.device)
    comms.all_reduce(total, norm_over(engine.plan), "gradient norm")
    return math.sqrt(comms.read(total))
