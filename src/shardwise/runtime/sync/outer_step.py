"""Outer steps of `sync=local`: replicas agree on weights after some steps of their own (local SGD, DiLoCo).

The outer gradient of a replica is what the weights were at the last outer step less what they are now. Its mean over
the replicas moves the former, either all the way (`outer=average`) or by SGD with Nesterov momentum. Every rank does
this for the interval of each unit that its optimizer owns, with the ranks of the other replicas that own it.

The sum of a unit's outer gradients over the replicas with few bits on the wire, under error feedback.

Each replica packs the pieces of its outer gradient, one for every replica, and gets by an all-to-all what the others
have packed of its own piece. It packs the sum of these again, and an all-gather brings all sums together. The error of
each packed piece is added to what is packed there the next time, as in `zero.packed_sum`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.layout.axes import REPLICA
from shardwise.layout.homes import DISK_WRITE, TO_DEVICE, TO_HOST
from shardwise.layout.outer import (
    OUTER_LR,
    OUTER_MOMENTUM,
    OuterPieces,
    averaged_moments,
    keeps_base,
    keeps_momentum,
    outer_pieces,
    outer_residuals,
)
from shardwise.layout.wire import WIRE_DTYPE, PackedRun
from shardwise.runtime.offload.state import MASTER
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.zero.flat_unit import HOST, torch_dtype
from shardwise.runtime.zero.optimizer import Optimizer, UnitState
from shardwise.runtime.zero.quantized import pack, repack, unpack


@dataclass(frozen=True)
class Rounds:
    """Rounds of a run. Steps count from 0, and go on counting when a run is resumed."""

    every: int
    """Steps of a round; the last one of a run may be shorter."""
    steps: int
    """Steps of the run."""

    @classmethod
    def of(cls, layout: Layout, steps: int) -> Self:
        return cls(layout.every if layout.local_sgd else 1, steps)

    def begins(self, step: int) -> bool:
        return step % self.every == 0

    def ends(self, step: int) -> bool:
        return (step + 1) % self.every == 0 or step + 1 == self.steps

    def due(self, period: int, step: int) -> bool:
        """Whether something that is to happen every `period` steps does so after a step: rounded up to the end of a
        round. Never, if `period` is 0."""
        start = step // self.every * self.every
        return period > 0 and self.ends(step) and (step + 1) // period > start // period

    def ends_after(self, step: int) -> int:
        """The first step before which all ranks can stop when one of them, about to begin `step`, says so: no rank has
        begun it, and it begins a round."""
        return step + 2 if self.every == 1 else -(-(step + 1) // self.every) * self.every

    def measured(self, start: int, warm: int) -> int:
        """The step whose report is taken, of a run that starts at `start`: it ends a round, after `warm` steps if there
        are enough, and another one follows whose last step gives the times."""
        ends = [step for step in range(start, self.steps) if self.ends(step)]
        first = sum(step < start + warm for step in ends)
        return ends[max(0, min(first, len(ends) - 2))]


class PackedExchange:
    """The exchange of one unit.

    home: device of the residuals between outer steps.
    """

    def __init__(
        self, unit: str, pieces: OuterPieces, sizes: tuple[int, int], comms: Comms, home: torch.device
    ) -> None:
        self._unit, self._pieces, self._comms = unit, pieces, comms
        self.first, self.second = (torch.zeros(elements, device=home) for elements in sizes)
        """Errors of this rank's outer gradient [interval], and of the sums of its piece [piece]; fp32."""

    def sum(self, numbers: Tensor) -> None:
        """Put the sum over the replicas in place of this rank's outer gradient [interval]. All replicas call this
        together."""
        pieces, own = self._pieces, self._comms.index(REPLICA)
        first, second = self.first.to(numbers.device), self.second.to(numbers.device)
        shape, dtype = (pieces.count, pieces.nbytes), torch_dtype(WIRE_DTYPE)
        sent = torch.zeros(shape, dtype=dtype, device=numbers.device)
        received = torch.empty(shape, dtype=dtype, device=numbers.device)
        for piece, elements, run in self._runs():
            pack(numbers[elements], pieces.bits, sent[piece, run.packed], first[elements])
        self._comms.all_to_all(received.view(-1), sent.view(-1), REPLICA, self._unit)
        for run in pieces.runs(own):
            parts = [part[run.packed] for part in received]
            elements = run.elements.stop - run.elements.start
            repack(parts, pieces.bits, elements, sent[own, run.packed], second[run.elements])
        self._comms.all_gather(received.view(-1), sent[own], REPLICA, self._unit)
        for piece, elements, run in self._runs():
            unpack(received[piece, run.packed], pieces.bits, numbers[elements])
        for kept, now in ((self.first, first), (self.second, second)):
            if kept is not now:
                kept.copy_(now)

    def mean_error(self) -> Tensor:
        """What each replica would have to add to its next outer gradient to make up for all that was lost [interval].
        All replicas call this together."""
        every = self.first.clone()
        start = self._comms.index(REPLICA) * self._pieces.elements
        mine = every[start : start + self._pieces.elements]
        mine.add_(self.second[: len(mine)])
        moved = self._comms.reachable(every)
        self._comms.all_reduce(moved, REPLICA, self._unit)
        return every.copy_(moved).div_(self._pieces.count)

    def restore(self, error: Tensor | None) -> None:
        """Set the residuals to those of `mean_error`; None: to zero."""
        self.second.zero_()
        if error is None:
            self.first.zero_()
        else:
            self.first.copy_(error)

    def _runs(self) -> Iterator[tuple[int, slice, PackedRun]]:
        """(piece, elements of the interval, run) of all pieces."""
        for piece in range(self._pieces.count):
            start = piece * self._pieces.elements
            for run in self._pieces.runs(piece):
                yield piece, slice(start + run.elements.start, start + run.elements.stop), run


class OuterUnit:
    """Outer state of one unit's interval. With offloaded optimizer state it is in the host's memory."""

    def __init__(self, state: UnitState, comms: Comms) -> None:
        plan, unit, device = state.flat.plan, state.flat.unit, state.flat.whole.device
        self.state, self.elements = state, unit.shard_numel
        self.home = HOST if plan.layout.offload_home != "none" else device
        self.base: Tensor | None = None
        """Weights of the last outer step."""
        self.momentum: Tensor | None = None
        self.packed: PackedExchange | None = None
        wide = torch_dtype(plan.dtypes.master)
        if keeps_base(plan):
            self.base = torch.empty(self.elements, dtype=wide, device=self.home)
            self.rebase()
        if keeps_momentum(plan):
            self.momentum = torch.zeros(self.elements, dtype=wide, device=self.home)
        pieces = outer_pieces(plan, unit, comms.index(unit.sharded_over))
        if pieces is not None:
            self.packed = PackedExchange(unit.name, pieces, outer_residuals(plan, unit), comms, self.home)

    def runs(self, kind: int) -> Iterator[tuple[slice, Tensor]]:
        """(elements of the interval, one of `STATES` there), on each device that has some."""
        for run in (*self.state.here, *self.state.away):
            yield slice(run.start, run.stop), run.get(kind, run.start, run.stop)

    def rebase(self) -> None:
        """Take the present weights as the ones that all replicas share."""
        if self.base is not None:
            for elements, weights in self.runs(MASTER):
                self.base[elements].copy_(weights)

    def gradient(self, numbers: Tensor) -> None:
        """Fill in the outer gradient, or, where nothing else moves them, minus the weights themselves."""
        for elements, weights in self.runs(MASTER):
            part = numbers[elements]
            if self.base is None:
                torch.neg(weights.to(part.device), out=part)
            else:
                torch.sub(self.base[elements].to(part.device), weights.to(part.device), out=part)

    def update(self, mean: Tensor) -> None:
        """Move the weights by the mean of the outer gradients, which is not needed afterwards."""
        mean = mean.to(self.home)
        if self.base is None:
            self.state.put(MASTER, 0, mean.neg_())
            return
        if self.momentum is None:
            self.base.sub_(mean)
        else:
            # torch.optim.SGD's own order: the gradient, and the momentum that has it already.
            self.momentum.mul_(OUTER_MOMENTUM).add_(mean)
            self.base.sub_(mean.add_(self.momentum, alpha=OUTER_MOMENTUM), alpha=OUTER_LR)
        self.state.put(MASTER, 0, self.base)

    def average(self, kind: int, numbers: Tensor, comms: Comms) -> None:
        """Give all replicas the mean of theirs, of one of `STATES`. numbers: room for an interval, on the device."""
        for elements, values in self.runs(kind):
            numbers[elements].copy_(values)
        comms.all_reduce(numbers, REPLICA, self.state.flat.unit.name)
        self.state.put(kind, 0, numbers.div_(comms.size(REPLICA)))

    @property
    def tensors(self) -> list[Tensor]:
        residuals = [self.packed.first, self.packed.second] if self.packed else []
        return [tensor for tensor in (self.base, self.momentum, *residuals) if tensor is not None]


class OuterStep:
    """Outer steps of one rank. Creating it takes the optimizer's weights as the ones that all replicas share."""

    def __init__(self, optimizer: Optimizer, comms: Comms) -> None:
        self._plan, self._comms = optimizer.engine.plan, comms
        self.units = {state.flat.unit.name: OuterUnit(state, comms) for state in optimizer.states}
        self.replicas = comms.size(REPLICA)
        self.averaged = averaged_moments(self._plan)
        self.losses: list[float] = []
        """Mean over the tokens of all replicas, of each step from the outer step before the last one to the last one;
        NaN of a step whose update a replica has skipped."""
        self.loss = math.nan
        """Mean over all tokens of those steps, but for skipped ones."""
        self._sums: list[tuple[float, float]] = []
        """(summed loss, tokens) of this replica, of each step since the last outer one."""
        for tensor in self.on_host():
            optimizer.engine.host.add("optimizer", tensor.nbytes)

    def step(self) -> None:
        """Agree with the other replicas; the engine gathers the new weights after it. All ranks call this together."""
        self._comms.pulse.work("the outer step")
        with self._comms.in_phase("optimizer"):
            for name, unit in self.units.items():
                numbers = self._room(unit)
                unit.gradient(numbers)
                if unit.packed is None:
                    self._comms.all_reduce(numbers, REPLICA, name)
                else:
                    unit.packed.sum(numbers)
                unit.update(numbers.div_(self.replicas))
                for kind in range(MASTER + 1, MASTER + 1 + self.averaged):
                    unit.average(kind, numbers, self._comms)
                if self._plan.layout.offload_home != "none":
                    self._note_copies(unit, numbers.dtype)
                del numbers  # before there is room for the next unit's

    def average_moments(self) -> None:
        """Give all replicas the mean of their moments. All ranks call this together."""
        for unit in self.units.values():
            for kind in range(MASTER + 1, len(self._plan.workload.states)):
                unit.average(kind, self._room(unit), self._comms)

    def _room(self, unit: OuterUnit) -> Tensor:
        dtype, device = torch_dtype(self._plan.dtypes.master), unit.state.flat.whole.device
        return torch.empty(unit.elements, dtype=dtype, device=device)

    def _note_copies(self, unit: OuterUnit, wide: torch.dtype) -> None:
        """The outer gradient has come to the device, its mean has gone back, and new weights to where they are kept; so
        have moments that are averaged, from and to the host."""
        flat, layout = unit.state.flat, self._plan.layout
        name, dtype, away = flat.unit.name, torch_dtype(layout.dtype), unit.elements - unit.state.cut
        copies = [(op, wide, unit.elements + self.averaged * away) for op in (TO_DEVICE, TO_HOST)]
        stored = layout.offloads_params
        copies.append((TO_HOST, dtype, unit.state.cut) if stored else (TO_DEVICE, dtype, away))
        if flat.file is not None:
            copies.append((DISK_WRITE, dtype, unit.elements))
        for op, kind, elements in copies:
            if elements:
                self._comms.copied(op, name, kind, elements)

    def count_loss(self, loss: float, tokens: float, agrees: bool) -> None:
        """Note the loss of this replica's step; with the outer step the means over all replicas are known."""
        self._sums.append((loss * tokens, float(tokens)))
        if not agrees:
            return
        sums = self._over_replicas(self._sums, self._plan.layout.every)
        self.losses = [total / max(1.0, count) for total, count in sums]
        finite = [both for both in sums if math.isfinite(both[0])]
        self.loss = sum(total for total, _ in finite) / sum(count for _, count in finite) if finite else math.nan
        self._sums = []

    def mean(self, total: float, count: int) -> float:
        ((total, tokens),) = self._over_replicas([(total, float(count))], 1)
        return total / max(1.0, tokens)

    def _over_replicas(self, sums: list[tuple[float, float]], room: int) -> list[tuple[float, float]]:
        """Sums of pairs of numbers over all replicas. room: pairs that are sent, whose number is the same each time."""
        device = next(iter(self.units.values())).state.flat.whole.device
        both = torch.tensor(sums + [(0.0, 0.0)] * (room - len(sums)), dtype=torch.float64, device=device)
        with self._comms.in_phase("loss"):
            self._comms.all_reduce(both.view(-1), REPLICA, "loss")
        if not self._comms.moves_data:
            return sums
        return [(total, count) for total, count in both[: len(sums)].tolist()]

    def rebase(self) -> None:
        """Weights were set from elsewhere: all replicas have them."""
        for unit in self.units.values():
            unit.rebase()

    def owned(self) -> list[Tensor]:
        """The tensors that count as optimizer state on the device."""
        return [] if self._on_host else self._tensors()

    def on_host(self) -> list[Tensor]:
        return self._tensors() if self._on_host else []

    @property
    def _on_host(self) -> bool:
        return self._plan.layout.offload_home != "none"

    def _tensors(self) -> list[Tensor]:
        return [tensor for unit in self.units.values() for tensor in unit.tensors]
