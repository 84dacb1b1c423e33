"""The ZeRO engine: flat buffers, and what moves through them when, for every stage with one piece of code.

Each unit of the `UnitPlan` is one flat buffer whose views are the decoder's parameters; each gradient lives at a fixed
address too, as a view that autograd adds into. What differs between stages is which of those buffers are whole and
which are one rank's interval:

    stage   parameters            gradients          optimizer    communication of a unit
    0       whole                 whole              whole        all-reduce after the last micro-batch
    1       whole                 whole              interval     reduce-scatter after the last, gather of parameters
    2       whole                 interval           interval     reduce-scatter after each, gather of parameters
    3       interval (+ slots)    interval           interval     gather for each use, reduce-scatter after each

At stage 3 a unit's weights always appear in the same slot, so a weight that autograd saved is right again as soon as
the unit is gathered for its backward; `use_unit` follows the plan's list of uses and checks each step against it, and
the collective that fills a slot is issued one use ahead when nothing in use lies there. Under a pipeline each unit has
a slot of its own, and the schedule's actions say when it is filled (`unshard`) and emptied (`reshard`), and when the
gradients of a stage are reduced (`reduce`).

Nothing is held before it is needed: an accumulator comes with its unit's first gradient of a step and goes when the
optimizer has read it; full gradients on their way, and the scratch of their reduction, go when the sum is in. Where
ranks of one host read each other's memory, full gradients of stage 3 are staged in *staging slots* that units take in
turn, and that stay, as the weights' slots do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.decoder import Decoder
from shardwise.decoder.modules import TiedLinear
from shardwise.layout.axes import SHARD
from shardwise.layout.pipeline import releases_early, splits_backward
from shardwise.layout.placement import Placed
from shardwise.layout.units import Gather, Hop, Phase, Residency, Unit, UnitPlan, Use
from shardwise.model.parameters import Parameter
from shardwise.ops.gradients import GradSlot, WeightGradients, bind_grad_slot
from shardwise.runtime.transport.adding import Target
from shardwise.runtime.transport.comms import Comms, Waitable
from shardwise.runtime.zero.buffers import Buffer, ByteCounter, SharedBuffer

Values = Callable[[Parameter, Tensor], Tensor]
"""(parameter, row-major global positions) -> float64 values: where initial weights come from."""


FILLED = 1 << 24
"""Elements whose initial values are drawn at a time: their counters are 64-bit numbers, several for each."""


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class FlatUnit:
    """The buffers of one unit on one rank.

    whole: the flat buffer that parameters are views of, padded (a slot at stage 3). interval: this rank's ZeRO
    interval of it, the same memory as `whole` below stage 3; at stage 3 it is in the optimizer's precision (fp32 for
    bf16), and each gather sends it rounded. grads: the accumulator, whole or interval by stage.
    staging: the full gradient in compute precision that autograd adds into, where that is not the accumulator.
    A plan without a training step has no gradients. shared: where the full gradient is staged, if that memory is shared
    by units.
    """

    def __init__(
        self,
        unit: Unit,
        plan: UnitPlan,
        slots: dict[str, Buffer],
        shard_index: int,
        device: torch.device,
        tally: ByteCounter,
        shared: SharedBuffer | None,
    ) -> None:
        self.unit, self.plan = unit, plan
        stage, n = plan.layout.stage, unit.shard_numel
        dtype = torch_dtype(plan.layout.dtype)
        self.start, self.stop = shard_index * n, (shard_index + 1) * n
        self.slot = slots[unit.slot] if stage == 3 else None
        if stage == 3:
            self.whole = slots[unit.slot].tensor[: unit.padded]
            self.interval = torch.zeros(n, dtype=torch_dtype(plan.interval_dtype), device=device)
        else:
            self.whole = torch.zeros(unit.padded, dtype=dtype, device=device)
            self.interval = self.whole[self.start : self.stop]
        self.staging: Buffer | SharedBuffer | None = shared
        if plan.trains:
            elements = n if stage >= 2 else unit.padded
            self.grads = Buffer("gradients", elements, torch_dtype(plan.grad_dtype), device, tally)
            if plan.stages_gradients and shared is None:
                self.staging = Buffer("comm", unit.padded, dtype, device, tally)
        self.places: list[GradSlot] = []
        self._overwritten: list[GradSlot] = []
        self._added_to: list[Tensor] = []

    @property
    def grads_interval(self) -> Tensor:
        """The accumulated gradient of this rank's interval."""
        grads = self.grads.tensor
        return grads if self.plan.layout.stage >= 2 else grads[self.start : self.stop]

    def fill(self, values: Values) -> Tensor:
        """Set the parameters from global values; returns the interval's values in the optimizer's precision.

        Weights are those values rounded, as they will be after every update.
        """
        own = torch.zeros(self.stop - self.start, dtype=torch.float64, device=self.interval.device)
        for start, placed in zip(self.unit.offsets, self.unit.placed, strict=True):
            for first in range(0, placed.numel, FILLED):
                last = min(first + FILLED, placed.numel)
                a, b = max(start + first, self.start), min(start + last, self.stop)
                if a < b:
                    own[a - self.start : b - self.start] = local_values(
                        placed, a - start, b - start, values, own.device
                    )
                if self.plan.layout.stage in (1, 2):
                    every = local_values(placed, first, last, values, own.device)
                    self.whole[start + first : start + last].copy_(every.to(torch_dtype(self.plan.master_dtype)))
        own = own.to(torch_dtype(self.plan.master_dtype))
        self.interval.copy_(own)
        return own

    @property
    def full_grads(self) -> Buffer | SharedBuffer:
        """The whole unit's gradients, where backward adds them up."""
        return self.grads if self.staging is None else self.staging

    def divide(self, overwrites: Callable[[Placed], bool]) -> list[GradSlot]:
        """A place for each parameter's gradient. Those which are not overwritten, and the padding, must be emptied."""
        grads, self.places = self.full_grads.take(), []
        self._overwritten, self._added_to = [], []
        at = 0  # start of the span of gradients that autograd adds to
        for start, placed in zip(self.unit.offsets, self.unit.placed, strict=True):
            stop = start + placed.numel
            self.places.append(GradSlot(grads[start:stop].view(placed.shape)))
            if overwrites(placed):
                self._overwritten.append(self.places[-1])
                self._added_to += [grads[at:start]] if at < start else []
                at = stop
        self._added_to += [grads[at:]] if at < len(grads) else []
        self.full_grads.free()
        return self.places

    def allocate_grads(self) -> None:
        """Memory for what backward is about to add up, with nothing in it."""
        self.full_grads.take()
        for place in self._overwritten:
            place.empty = True
        for span in self._added_to:
            span.zero_()

    def empty_rest(self) -> None:
        """Zero what nothing has been added to: gradients of biases, where only products came after `allocate_grads`."""
        for place in self._overwritten:
            if place.empty:
                place.view.zero_()
                place.empty = False

    def accumulator(self) -> Target:
        """Where one micro-batch's gradient goes: to those before it, if there are any."""
        return Target(self.grads.tensor, True) if self.grads.held else Target(self.grads.take())

    def add_gradients(self, piece: Tensor) -> None:
        """Accumulate one micro-batch's gradient."""
        into, adds = self.accumulator()
        if adds:
            into.add_(piece)
        else:
            into.copy_(piece)


def local_values(placed: Placed, start: int, stop: int, values: Values, device: torch.device) -> Tensor:
    """Values of elements [start, stop) of a parameter's local flat tensor; zero where it is padding."""
    local = torch.arange(start, stop, device=device)
    if placed.dim is None:
        return values(placed.parameter, local)
    columns = placed.shape[1] if len(placed.shape) == 2 else 1
    row, column = local // columns, local % columns
    if placed.dim == 0:
        row = row + placed.start
        valid = row < placed.stop
    else:
        column = column + placed.start
        valid = column < placed.stop
    global_columns = placed.parameter.shape[1] if len(placed.shape) == 2 else 1
    index = (row * global_columns + column).clamp_(max=placed.parameter.numel - 1)
    return torch.where(valid, values(placed.parameter, index), 0.0)


class Engine:
    """Binds a decoder (built on the meta device) to flat buffers and moves them as the plan says.

    A training step is: `begin_step`, then for every micro-batch `begin_micro_batch`, its visits (`use_unit` before a
    part computes, `finish_backward` after its backward), then `finish_step`; the optimizer then reads
    `FlatUnit.interval` and `grads_interval`, and `all_gather_params` makes the new parameters known. Under a pipeline
    there is no order of micro-batches, and `unshard`, `reshard` and `reduce` come as the schedule has them. A turn of
    generation is `begin_forward` and the visits of its parts.

    overwriting: modules that add their weights' gradients into the places themselves, which then need no zeroing.
    weights: when they do.
    """

    def __init__(
        self,
        decoder: Decoder,
        plan: UnitPlan,
        comms: Comms,
        device: torch.device,
        overwriting: Collection[nn.Module],
        weights: WeightGradients,
    ) -> None:
        self.decoder, self.plan, self.comms = decoder, plan, comms
        self._weights = weights
        self._splits = plan.layout.pp > 1 and splits_backward(plan.layout.schedule, releases_early(plan.layout))
        self.stage = plan.layout.stage
        self.tally = ByteCounter()
        comms.workspace.changed = partial(self.tally.add, "comm")
        self._slots, self._lent = self._make_slots(device, plan.slots if self.stage == 3 else {})
        self._staging_slots, self._reads_staged = self._make_slots(device, plan.staging_sizes)
        scratch_dtype = plan.wire_dtype if plan.trains else plan.layout.dtype
        self._scratch = Buffer("comm", plan.scratch, torch_dtype(scratch_dtype), device, self.tally)
        self.units = {
            u.name: FlatUnit(u, plan, self._slots, comms.index(u.shard), device, self.tally, self._staging_share(u))
            for u in plan.units
        }
        self._gathers: dict[str, Waitable] = {}
        self._reductions: dict[str, Waitable] = {}
        self._residency = Residency(plan) if plan.layout.pp > 1 else None
        self._uses: list[Use] = []
        self._at = 0
        self._turns: dict[Phase, tuple[list[Use], list[Use]]] = {}
        self._empty = True
        """Whether no turn of generation has gathered anything yet."""
        self._last_micro_batch = True
        self._bind(overwriting)
        if self._residency is not None:
            for slot in self._slots.values():
                slot.free()

    def _make_slots(self, device: torch.device, wanted: dict[str, int]) -> tuple[dict[str, Buffer], bool]:
        """Buffers of so many elements that units take in turn; whether the other ranks read them in place."""
        dtype = torch_dtype(self.plan.layout.dtype)
        # Under a pipeline they come and go.
        lent = {} if self.plan.layout.pp > 1 or not wanted else self.comms.borrow(wanted, dtype, SHARD)
        slots = {}
        for name, elements in wanted.items():
            slots[name] = Buffer("comm", elements, dtype, device, self.tally, lent.get(name))
            slots[name].take().zero_()
        return slots, bool(lent)

    def _staging_share(self, unit: Unit) -> SharedBuffer | None:
        """Where a unit's full gradient is staged, if that memory is there for good."""
        if unit.name not in self.plan.staging_slots:
            return None
        whole = self._staging_slots[self.plan.staging_slots[unit.name]]
        return SharedBuffer(whole, unit.padded, partial(self.comms.release, axes=unit.shard))

    def _bind(self, overwriting: Collection[nn.Module]) -> None:
        """Replace the decoder's parameters by views of the flat buffers, with gradients as views too."""
        modules = dict(self.decoder.named_modules())

        def owner(placed: Placed) -> tuple[nn.Module, str]:
            module, _, leaf = placed.name.rpartition(".")
            return modules[module], leaf

        for flat in self.units.values():
            places: Sequence[GradSlot | None] = [None] * len(flat.unit.placed)
            if self.plan.trains:
                places = flat.divide(lambda placed: owner(placed)[0] in overwriting)
            for start, placed, place in zip(flat.unit.offsets, flat.unit.placed, places, strict=True):
                weight = flat.whole[start : start + placed.numel].view(placed.shape)
                module, leaf = owner(placed)
                module._parameters[leaf] = _leaf(weight, place)
                if flat.unit.name == "tied":
                    # A second leaf on the same memory: the head adds its gradient as soon as it has it.
                    out = self.decoder.head.out
                    assert isinstance(out, TiedLinear)
                    out.use(_leaf(weight, place))

    # -- following the plan

    def begin_step(self) -> None:
        """A training step starts: the optimizer has forgotten the gradients, and at stage 3 nothing is resident."""
        self._micro_batches = list(self.plan.gathering_uses()) if self._residency is None else []
        self._index = -1

    def begin_micro_batch(self) -> None:
        self._index += 1
        self._last_micro_batch = self._index == len(self._micro_batches) - 1
        self._uses, self._at = self._micro_batches[self._index], 0

    def begin_evaluation(self) -> None:
        """A forward pass without backward; stage 3 gathers every unit once."""
        self._uses = [
            Use("forward", "forward", p, tuple(map(self.plan.gather, self.plan.units_of(p)))) for p in self.plan.parts
        ]
        self._at = 0
        self._gathers.clear()

    def begin_forward(self, phase: Phase) -> None:
        """A turn of generation: a forward pass which finds in the slots what the turn before has left there."""
        if phase not in self._turns:
            self._turns[phase] = self.plan.generating_uses(phase)
        self._uses, self._at = self._turns[phase][0 if self._empty else 1], 0
        self._empty = False

    def use_unit(self, kind: str, part: str) -> None:
        """`part` is about to compute: its weights are made resident, and the next use's are sent for.

        kind: "forward", "backward", "recompute", or "weights" for a backward of weights alone.
        """
        self.comms.pulse.work(f"{kind} of {part}")
        if self._residency is None:
            self._follow(kind, part)
        elif kind != "weights":
            for unit in self.plan.units_of(part):
                if unit.name in self._gathers:
                    self._gathers.pop(unit.name).wait()
        if kind in ("backward", "weights"):
            self._make_room(part)

    def _follow(self, kind: str, part: str) -> None:
        """The plan's next use of weights."""
        use = self._uses[self._at]
        assert (use.kind, use.part) == (kind, part), f"the plan says {use}, the program {kind} {part}"
        self._at += 1
        self.comms.phase = use.phase
        if self.stage < 3:
            return
        self._gather(use)
        for gather in use.gathers:
            self._gathers.pop(gather.unit).wait()
        if self._at < len(self._uses):
            following = self._uses[self._at]
            in_use = {unit.slot for unit in self.plan.units_of(part)}
            if not in_use & {self.units[gather.unit].unit.slot for gather in following.gathers}:
                with self.comms.in_phase(following.phase):
                    self._gather(following)

    def _gather(self, use: Use) -> None:
        for gather in use.gathers:
            if gather.unit not in self._gathers:
                self._gathers[gather.unit] = self._start(gather)

    def _start(self, gather: Gather) -> Waitable:
        flat = self.units[gather.unit]
        return self.comms.all_gather(flat.whole, flat.interval, gather.axes, gather.unit, later=True, lent=self._lent)

    @contextmanager
    def compile_guard(self, part: str) -> Iterator[None]:
        """Outside of steps: `part` may compute backward, too, and what it adds to gradients is forgotten."""
        slots = [flat.slot for flat in self._flats(part) if flat.slot is not None and not flat.slot.held]
        for slot in slots:
            slot.take().zero_()
        self._make_room(part)
        yield
        for flat in self._flats(part):
            flat.full_grads.free()
        for slot in slots:
            slot.free()

    def _flats(self, part: str) -> list[FlatUnit]:
        """The units whose weights `part` reads."""
        return [self.units[unit.name] for unit in self.plan.units_of(part)]

    def _make_room(self, part: str) -> None:
        """Memory for the full gradients that `part`'s backward adds up, where there is none yet."""
        for flat in self._flats(part):
            if flat.staging is not None and flat.unit.name in self._reductions:
                self._reductions[flat.unit.name].wait()
            if self._staging_slots and not flat.full_grads.held:
                self._clear_staging_slot(self.plan.staging_slots[flat.unit.name])
            if not flat.full_grads.held:
                flat.allocate_grads()

    def _clear_staging_slot(self, slot: str) -> None:
        """End the reduction of gradients that still lie where others are to be staged."""
        for name, pending in self._reductions.items():
            if self.plan.staging_slots[name] == slot:
                pending.wait()

    def finish_backward(self, part: str) -> None:
        """`part`'s backward is over: what it staged goes to the accumulators, or is reduced where that is due."""
        if self._weights.waiting:
            return  # its products are still to come
        if self.stage < 2:
            for flat in self._finished(part):
                if flat.staging is not None:
                    flat.add_gradients(flat.staging.tensor)
                    flat.staging.free()
        if self._residency is None and (self.stage >= 2 or self._last_micro_batch):
            self._reduce(part)

    def _finished(self, part: str) -> list[FlatUnit]:
        """The units whose gradients are complete after `part`'s backward."""
        found = [self.units[unit.name] for unit in self.plan.finished_after(part)]
        if self._splits:
            for flat in found:
                if flat.full_grads.held:
                    flat.empty_rest()
        return found

    def _reduce(self, part: str) -> None:
        """Start the reduction over the data ranks of the gradients that are complete after `part`'s backward."""
        for flat in self._finished(part):
            grads = flat.full_grads if self.stage >= 2 else flat.grads
            name = flat.unit.name
            for start, stop, axes in flat.unit.partial_sums:
                self.comms.all_reduce(grads.tensor[start:stop], axes, name)
            hop = next(iter(flat.unit.reduce), None)
            if hop is None:
                continue
            if hop.op == "all_reduce":
                self._reductions[name] = self.comms.all_reduce(grads.tensor, hop.axes, name, later=True)
            elif self._staging_slots:
                self._reduce_in_place(flat, grads, hop)
            else:
                into = flat.accumulator if self.stage >= 2 else partial(Target, flat.grads_interval)
                self._reduce_scatter(flat, grads, hop, into)

    # -- as the actions of a pipeline have it

    def unshard(self, stage: int) -> None:
        """Start to gather a stage's parameters (stage 3)."""
        assert self._residency is not None
        for unit in self._residency.gather(stage):
            flat = self.units[unit.name]
            assert flat.slot is not None
            flat.slot.take()
            self._gathers[unit.name] = self._start(self.plan.gather(unit))

    def reshard(self, stage: int) -> None:
        """Free them."""
        assert self._residency is not None
        for unit in self._residency.free(stage):
            flat = self.units[unit.name]
            assert flat.slot is not None
            flat.slot.free()

    def reduce(self, stage: int) -> None:
        """Start the reduction of a stage's gradients over the data ranks."""
        for part in reversed(self.plan.stages[stage]):
            self._reduce(part)

    def tied_gradients(self) -> Tensor:
        """The reduced gradients of the tied table, of which the other end of the pipeline has the same interval."""
        for pending in self._reductions.values():
            pending.wait()
        return self.units["tied"].grads_interval

    def _reduce_scatter(
        self, flat: FlatUnit, full: Buffer | SharedBuffer, hop: Hop, into: Callable[[], Target]
    ) -> None:
        """Send a unit's full gradients on their way: this rank's piece of the sum goes to `into`. A full gradient that
        is staged is then done with, and its memory goes."""
        for pending in self._reductions.values():
            pending.wait()  # one scratch buffer: the previous reduction must have left it
        scratch = self._scratch.take(flat.unit.padded) if self.plan.scratch else None

        def done() -> None:
            self._scratch.free()
            if full is flat.staging:
                full.free()

        self._reductions[flat.unit.name] = self.comms.reduce_scatter(
            full.tensor, hop.axes, flat.unit.name, into, done=done, scratch=scratch, later=True
        )

    def _reduce_in_place(self, flat: FlatUnit, full: Buffer | SharedBuffer, hop: Hop) -> None:
        """The same where peers read what is staged: they may from now on. Whoever comes last finds all there, and adds
        up at once what the others come back for later: so ranks need not go in step."""
        into, name = flat.accumulator(), flat.unit.name
        before = list(self._reductions.values())
        self._reductions[name] = self.comms.reduce_scatter(
            full.tensor, hop.axes, name, lambda: into, done=full.free, later=True, lent=self._reads_staged
        )
        for pending in before:
            pending.wait()
        if self._reductions[name].arrived():
            self._reductions[name].wait()

    def finish_step(self) -> None:
        """All backwards are over: wait for the reductions, and take the hops that follow them (HSDP)."""
        for pending in self._reductions.values():
            pending.wait()
        self._reductions.clear()
        with self.comms.in_phase("backward"):
            pendings = [
                self.comms.all_reduce(flat.grads_interval, hop.axes, name, later=True)
                for name, flat in self.units.items()
                for hop in flat.unit.reduce[1:]
            ]
        for pending in pendings:
            pending.wait()

    def all_gather_params(self) -> None:
        """After the optimizer: stages 1 and 2 gather the new parameters, stage 3 forgets what is resident."""
        self._gathers.clear()
        if self.stage in (1, 2):
            with self.comms.in_phase("optimizer"):
                pendings = [self._start(self.plan.gather(unit)) for unit in self.plan.units]
            for pending in pendings:
                pending.wait()

    # -- what it holds

    def storages(self) -> dict[str, list[Tensor]]:
        """Class of bytes -> the tensors whose storages belong to it, for the memory report."""
        flats = list(self.units.values())
        weights = [flat.interval if self.stage == 3 else flat.whole for flat in flats]
        staged = [flat.staging for flat in flats if flat.staging is not None]
        comm = [*self._slots.values(), *self._staging_slots.values(), *staged, self._scratch]
        return {
            "parameters": weights,
            "gradients": [flat.grads.tensor for flat in flats] if self.plan.trains else [],
            "comm": [buffer.tensor for buffer in comm],
        }


def _leaf(weight: Tensor, place: GradSlot | None) -> nn.Parameter:
    """A parameter on the memory of `weight`, with a version counter of its own. place: None where nothing trains.

    Autograd would otherwise refuse a weight that was gathered again between its forward and its backward, though the
    slot then holds the same values as before.
    """
    own = torch.empty(0, dtype=weight.dtype, device=weight.device)
    own.set_(weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride())
    parameter = nn.Parameter(own, requires_grad=place is not None)
    if place is not None:
        bind_grad_slot(parameter, place)
    return parameter
