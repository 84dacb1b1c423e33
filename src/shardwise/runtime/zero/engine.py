"""The ZeRO engine: flat buffers, and what moves through them when, for every stage with one piece of code.

Each unit of the `UnitPlan` is one flat buffer whose views are the module's parameters; each gradient lives at a fixed
address too, as a view that autograd adds into. What differs between stages is which of those buffers are whole and
which are one rank's interval:

    stage   parameters            gradients          optimizer    communication of a unit
    0       whole                 whole              whole        all-reduce after the last micro-batch
    1       whole                 whole              interval     reduce-scatter after the last, gather of parameters
    2       whole                 interval           interval     reduce-scatter after each, gather of parameters
    3       interval (+ slots)    interval           interval     gather for each use, reduce-scatter after each

Under hpz (ZeRO++'s hpZ) a rank also keeps its part of what a unit's first gather of a step gave, cut over few ranks
which are near each other, and all other gathers of the step are among these. They move the same bits.

At stage 3 a unit's weights always appear in the same slot, so a weight that autograd saved is right again as soon as
the unit is gathered for its backward; `use_unit` follows the plan's list of uses and checks each step against it, and
the collective that fills a slot is issued one use ahead when nothing in use lies there. Under a pipeline each unit has
a slot of its own, and the schedule's actions say when it is filled (`unshard`) and emptied (`reshard`), and when the
gradients of a stage are reduced (`reduce`).

Frozen parameters have neither gradients nor optimizer state. Their units are whole below stage 3 and never gathered;
at stage 3 they are gathered for each use, as all others.

Nothing is held before it is needed: an accumulator comes with its unit's first gradient of a step and goes when the
optimizer has read it; full gradients on their way go when the sum is in, unless the transport has lasting buffers for
them (`layout/transport_buffers.py`).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.decoder import Decoder
from shardwise.decoder.modules import TiedLinear
from shardwise.layout.axes import Axes
from shardwise.layout.gathers import (
    Phase,
    Residency,
    StepGathers,
    Use,
    gather_of,
    gathering_uses,
    generating_uses,
    packed_slot_bytes,
    slot_dtypes,
    slot_elements,
)
from shardwise.layout.gradients import finished_after, packed_gradients, trained_units
from shardwise.layout.homes import TO_HOST, accumulates_on_host
from shardwise.layout.pipeline import splits_backward
from shardwise.layout.transport_buffers import transport_buffers
from shardwise.layout.unit import Gather, Hop
from shardwise.layout.units import UnitPlan
from shardwise.layout.wire import WIRE_DTYPE
from shardwise.model.adapters import is_narrow
from shardwise.ops.gradients import GradSlot, WeightGradients, bind_grad_slot
from shardwise.runtime.offload.file import OffloadFile
from shardwise.runtime.offload.state import StoredIntervals
from shardwise.runtime.transport.buffers import Buffer, ByteCounter
from shardwise.runtime.transport.comms import Comms
from shardwise.runtime.transport.protocol import DONE, Work
from shardwise.runtime.zero.flat_unit import FlatUnit, torch_dtype
from shardwise.runtime.zero.packed_sum import PackedSum


class Engine:
    """Binds a module (a decoder, on the meta device, or a user's) to flat buffers and moves them as the plan says.

    A training step is: `begin_step`, then for every micro-batch `begin_micro_batch`, its visits (`use_unit` before a
    part computes, `finish_backward` after its backward), then `finish_step`; the optimizer then reads
    `FlatUnit.interval` and `grads_interval`, and `all_gather_params` makes the new parameters known. Under a pipeline
    there is no order of micro-batches, and `unshard`, `reshard` and `reduce` come as the schedule has them. A turn of
    generation is `begin_forward` and the visits of its parts.

    overwriting: modules that add their weights' gradients into their slots themselves, which then need no zeroing.
    weights: when they do.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: UnitPlan,
        comms: Comms,
        device: torch.device,
        overwriting: Collection[nn.Module],
        weights: WeightGradients,
        file: OffloadFile | None = None,
    ) -> None:
        self.module, self.plan, self.comms, self.device = module, plan, comms, device
        self._weights = weights
        self._splits = plan.layout.pp > 1 and splits_backward(plan.layout.schedule, plan.pipeline.early)
        self.stage = plan.layout.stage
        self.tally = tally = ByteCounter()
        self.host = host = ByteCounter()
        """Bytes of what is offloaded to the host's memory, and of the buffers for it."""
        self.file = file
        comms.workspace.tally, comms.staging.tally = self.tally, host
        self._sums_on_host = accumulates_on_host(plan)
        self._slots = self._weight_slots(device) if self.stage == 3 else {}
        self._buffers = transport_buffers(plan)
        staging = self._staging_buffers(device)
        self._reserved = self._reserve(device)
        buffers = self._buffers
        room = max((buffers.room(plan, unit) for unit in plan.units if packed_gradients(plan, unit)), default=0)
        self._room = Buffer("comm", room, torch_dtype(WIRE_DTYPE), device, self.tally)
        slots, wires = self._slots, self._packed_slots(device)
        self._wires = wires
        self.units = {
            u.name: FlatUnit(
                u, plan, slots.get(u.slot), wires.get(u.slot), staging.get(u.name), comms.index, device, tally,
                host, file,
            )
            for u in plan.units
        }  # fmt: skip
        self.stored: StoredIntervals | None = None
        """Intervals of parameters that are off the device."""
        if plan.layout.offloads_params and plan.trains:
            self.stored = StoredIntervals(plan, file, host)
        for buffer in file.buffers if file is not None else []:
            host.add("comm", buffer.nbytes)
        self._gathers: dict[str, Work] = {}
        self._packed: set[str] = set()
        """Units whose own packed weights are those of today."""
        self._gathers_of_step = StepGathers(plan)
        self._reductions: dict[str, Work] = {}
        self._residency = Residency(plan) if plan.layout.pp > 1 or plan.of_kind("entry") else None
        self._uses: list[Use] = []
        self._at = 0
        self._passes: list[int] = []
        """Forward passes with gradients of each micro-batch so far."""
        self._forwards: dict[Phase, tuple[list[Use], list[Use]]] = {}
        self._empty = True
        """Whether no turn of generation has gathered anything yet."""
        self._last_micro_batch = True
        self._bind(overwriting)
        if self._residency is not None:
            for slot in self._slots.values():
                slot.free()

    def _weight_slots(self, device: torch.device) -> dict[str, Buffer]:
        """Buffers of gathered weights. Under a pipeline they come and go."""
        slots = self._slot_buffers(slot_elements(self.plan), slot_dtypes(self.plan), device)
        for slot in slots.values():
            slot.take().zero_()
        return slots

    def _packed_slots(self, device: torch.device) -> dict[str, Buffer]:
        """Buffers of packed weights as they are gathered, which come and go with the slots of their weights."""
        sizes = packed_slot_bytes(self.plan)
        return self._slot_buffers(sizes, dict.fromkeys(sizes, WIRE_DTYPE), device)

    def _slot_buffers(self, sizes: dict[str, int], dtypes: dict[str, str], device: torch.device) -> dict[str, Buffer]:
        """A buffer for each slot that has a size. They last, but under a pipeline."""
        lasting, buffers = self.plan.layout.pp == 1, {}
        axes = {unit.slot: unit.sharded_over for unit in self.plan.units}
        for name, elements in sizes.items():
            dtype = torch_dtype(dtypes[name])
            memory = self._allocate(elements, dtype, device, axes[name]) if lasting else None
            buffers[name] = Buffer("comm", elements, dtype, device, self.tally, memory)
        return buffers

    def _staging_buffers(self, device: torch.device) -> dict[str, Buffer]:
        """Unit -> the buffer of its full gradients, where these are staged."""
        buffers, dtype = self._buffers, torch_dtype(self._buffers.dtype)
        lasting: dict[str, Tensor] = {}
        staging = {}
        for name, buffer in buffers.staged.items():
            unit = self.plan.by_name[name]
            if buffers.lasting and buffer not in lasting:
                lasting[buffer] = self._allocate(buffers.sizes[buffer], dtype, device, unit.sharded_over)
            memory = lasting[buffer][: unit.padded] if buffers.lasting else None
            reusable = partial(self.comms.wait_readers, axes=unit.sharded_over)
            staging[name] = Buffer("comm", unit.padded, dtype, device, self.tally, memory, reusable)
        return staging

    def _allocate(self, elements: int, dtype: torch.dtype, device: torch.device, axes: Axes) -> Tensor:
        memory = self.comms.allocate(elements, dtype, device, axes)
        self.tally.add("comm", memory.nbytes)
        return memory

    def _reserve(self, device: torch.device) -> list[Tensor]:
        scatters = {
            hop.axes: (unit.padded, hop.dtype)
            for unit in sorted(self.plan.units, key=lambda unit: unit.padded)
            for hop in unit.reduce
            if hop.op == "reduce_scatter"
        }
        reserved = []
        for axes, (elements, dtype) in scatters.items():
            reserved += self.comms.reserve(elements, torch_dtype(dtype), device, axes, self.tally)
        return reserved

    def _bind(self, overwriting: Collection[nn.Module]) -> None:
        """Replace the module's parameters by views of the flat buffers, with gradients as views too: one that several
        modules share, in each of them."""
        homes: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self.module.modules():
            for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                homes.setdefault(parameter, []).append((module, leaf))
        every = (parameter for flat in self.units.values() for parameter in flat.unit.placed)
        owners = {parameter.name: homes[self.module.get_parameter(parameter.name)] for parameter in every}

        for flat in self.units.values():
            grad_slots: Sequence[GradSlot | None] = [None] * len(flat.unit.placed)
            if flat.trains:
                grad_slots = flat.make_grad_slots(
                    lambda placed: all(module in overwriting for module, _ in owners[placed.name])
                )
            for start, placed, grad_slot in zip(flat.unit.offsets, flat.unit.placed, grad_slots, strict=True):
                weight = flat.whole[start : start + placed.numel].view(placed.view)
                parameter = _leaf(weight, grad_slot)
                for module, leaf in owners[placed.name]:
                    setattr(module, leaf, parameter)
                    if is_narrow(placed.parameter):
                        module.frozen_base = module.frozen_base.at(placed.box)  # type: ignore[union-attr,operator]
                if flat.unit.name == "tied" and isinstance(self.module, Decoder):
                    # A second leaf on the same memory: the head adds its gradient as soon as it has it.
                    assert isinstance(self.module.head.out, TiedLinear)
                    self.module.head.out.use(_leaf(weight, grad_slot))

    def overwrite(self, part: str) -> None:
        """From now on whatever computes `part`'s gradients adds each of them to its slot."""
        for flat in self._trained(part):
            flat.full_grads.take()  # views need memory
            flat.overwrite(lambda placed: True)
            flat.full_grads.free()

    @property
    def trained(self) -> list[FlatUnit]:
        return [flat for flat in self.units.values() if flat.trains]

    # -- following the plan

    def begin_step(self) -> None:
        """A training step starts: the optimizer has forgotten the gradients, and at stage 3 nothing is resident."""
        self._passes = [1] * self.plan.micro_batches
        self._micro_batches = list(gathering_uses(self.plan)) if self._residency is None else []
        self._gathers_of_step = StepGathers(self.plan)
        self._index = -1

    def begin_micro_batch(self) -> None:
        self._index += 1
        self._last_micro_batch = self._index == len(self._micro_batches) - 1
        self._uses, self._at = self._micro_batches[self._index], 0

    def begin_evaluation(self) -> None:
        """A forward pass without backward; stage 3 gathers every unit once."""
        self._uses = [
            Use("forward", "forward", p, tuple(gather_of(self.plan, unit) for unit in self.plan.units_of(p)))
            for p in self.plan.parts
        ]
        self._at = 0
        self._gathers.clear()

    @property
    def passes(self) -> int:
        """Forward passes with gradients of this micro-batch so far."""
        return self._passes[self._index]

    def another_pass(self) -> None:
        """A further forward pass with gradients begins, which the plan does not have; none has gone backward yet."""
        self._passes[self._index] += 1
        self._micro_batches = list(gathering_uses(self.plan, self._passes))
        self._uses = self._micro_batches[self._index]

    @contextmanager
    def evaluation_in_step(self) -> Iterator[None]:
        """A forward pass without gradients inside a step, which the plan does not have. Afterwards the slots of weights
        are as they were before it."""
        uses, at, arriving = self._uses, self._at, list(self._gathers)
        for pending in self._gathers.values():
            pending.wait()
        self.begin_evaluation()
        yield
        left = self._resident([self._uses[: self._at]])
        self._uses, self._at = uses, at
        self._gathers.clear()
        if self.stage < 3:
            return
        before = self._resident([*self._micro_batches[: self._index], uses[:at]])
        before |= {self.units[name].unit.slot: name for name in arriving}
        for slot, name in before.items():
            if left.get(slot) != name:
                self._start(gather_of(self.plan, self.units[name].unit)).wait()
        self._gathers.update(dict.fromkeys(arriving, DONE))

    def _resident(self, uses: Sequence[Sequence[Use]]) -> dict[str, str]:
        gathers = (gather for some in uses for use in some for gather in use.gathers)
        return {self.units[gather.unit].unit.slot: gather.unit for gather in gathers}

    def begin_forward(self, phase: Phase) -> None:
        """A turn of generation: a forward pass which finds in the slots what the turn before has left there."""
        if phase not in self._forwards:
            self._forwards[phase] = generating_uses(self.plan, phase)
        self._uses, self._at = self._forwards[phase][0 if self._empty else 1], 0
        self._empty = False

    @property
    def following(self) -> Use | None:
        """The plan's next use of weights; None at the end of a micro-batch."""
        return self._uses[self._at] if self._at < len(self._uses) else None

    @property
    def latest(self) -> Use | None:
        """The plan's use of weights before `following`; None at the beginning of a micro-batch."""
        return self._uses[self._at - 1] if self._at else None

    def to_come(self) -> Iterator[Use]:
        """The plan's next uses by blocks, of this forward pass, or of the whole backward pass."""
        for use in self._uses[self._at :]:
            if self.plan.blueprint.kind(use.part) == "root":
                return
            yield use

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
            self._allocate_grads(part)

    def _follow(self, kind: str, part: str) -> None:
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
        if self.stored is not None and self._at + 1 < len(self._uses):
            self._read_ahead(self._uses[self._at + 1])

    def _read_ahead(self, use: Use) -> None:
        assert self.stored is not None
        pending = {self.units[name].unit.slot for name in self._gathers}
        for gather in use.gathers:
            flat = self.units[gather.unit]
            copied = flat.copy is not None and gather.axes == flat.unit.again
            if flat.unit.slot not in pending and not copied and gather.unit not in self._packed:
                self.stored.prefetch(flat)

    def _gather(self, use: Use) -> None:
        for gather in use.gathers:
            if gather.unit not in self._gathers:
                self._gathers[gather.unit] = self._start(gather)

    def _start(self, gather: Gather) -> Work:
        flat = self.units[gather.unit]
        if flat.copy is not None and gather.axes == flat.unit.again:
            # Another group's ranks may still read what they gathered from this memory before.
            self.comms.wait_readers(flat.whole, flat.unit.sharded_over)
            return self.comms.all_gather(flat.whole, flat.copy, gather.axes, gather.unit, later=True)
        if flat.packed is None:
            out, piece = flat.whole, self._interval(flat)
        else:
            if gather.unit not in self._packed:
                self._packed.add(gather.unit)
                flat.packed.quantize(self._interval(flat))
            out, piece = flat.packed.take(), flat.packed.own
        return self.comms.all_gather(out, piece, gather.axes, gather.unit, done=flat.gathered, later=True)

    def _interval(self, flat: FlatUnit) -> Tensor:
        return flat.interval if self.stored is None else self.stored.fetch(flat, self.comms)

    @contextmanager
    def compile_guard(self, part: str) -> Iterator[None]:
        """Outside of steps: `part` may compute backward, too, and what it adds to gradients is forgotten."""
        slots = [flat.slot for flat in self._flats(part) if flat.slot is not None and not flat.slot.held]
        for slot in slots:
            slot.take().zero_()
        self._allocate_grads(part)
        yield
        for flat in self._trained(part):
            flat.full_grads.free()
        for slot in slots:
            slot.free()

    def _flats(self, part: str) -> list[FlatUnit]:
        return [self.units[unit.name] for unit in self.plan.units_of(part)]

    def _trained(self, part: str) -> list[FlatUnit]:
        return [self.units[unit.name] for unit in trained_units(self.plan, part)]

    def _allocate_grads(self, part: str) -> None:
        """Memory for the full gradients that `part`'s backward adds up, where there is none yet."""
        staged = self._buffers.staged
        for flat in self._trained(part):
            for name, pending in self._reductions.items():
                if flat.staging is not None and staged[name] == staged[flat.unit.name]:
                    pending.wait()
            if not flat.full_grads.held:
                flat.allocate_grads()

    def finish_backward(self, part: str) -> None:
        """`part`'s backward is over: what it staged goes to the accumulators, or is reduced where that is due."""
        if self._weights.waiting:
            return  # its products are still to come
        if self.stage < 2:
            for flat in self._finished(part):
                if flat.staging is not None:
                    flat.add_gradients(flat.staging.tensor)
                    flat.staging.free()
        if self._residency is None and (self.stage >= 2 or (self._last_micro_batch and not self._comes_again(part))):
            self._reduce(part)

    def _comes_again(self, part: str) -> bool:
        """Whether this micro-batch has another backward pass of `part`."""
        return any((use.kind, use.part) == ("backward", part) for use in self._uses[self._at :])

    def _finished(self, part: str) -> list[FlatUnit]:
        flats = [self.units[unit.name] for unit in finished_after(self.plan, part)]
        if self._splits:
            for flat in flats:
                if flat.full_grads.held:
                    flat.empty_rest()
        return flats

    def _reduce(self, part: str) -> None:
        """Start the reduction over the data ranks of the gradients that are complete after `part`'s backward."""
        for flat in self._finished(part):
            grads = flat.full_grads if self.stage >= 2 else flat.grads
            name = flat.unit.name
            for start, stop, axes in flat.unit.partial_sums:
                self.comms.all_reduce(grads.tensor[start:stop], axes, name)
            if self._sums_on_host:
                self.comms.copied(TO_HOST, name, torch_dtype(self.plan.dtypes.wire), flat.unit.shard_numel)
            hop = next(iter(flat.unit.reduce), None)
            if hop is None:
                continue
            if hop.op == "all_to_all":
                self._sum_packed(flat, grads)
                continue
            assert grads.tensor.dtype == torch_dtype(hop.dtype), f"the plan sends {hop}"
            if hop.op == "all_reduce":
                self._reductions[name] = self.comms.all_reduce(grads.tensor, hop.axes, name, later=True)
            else:
                self._reduce_scatter(flat, grads, hop)

    # -- as the actions of a pipeline have it

    def unshard(self, stage: int) -> None:
        """Start to gather a stage's parameters (stage 3)."""
        assert self._residency is not None
        for unit in self._residency.gather(stage):
            flat = self.units[unit.name]
            assert flat.slot is not None
            flat.slot.take()
            self._gathers[unit.name] = self._start(self._gathers_of_step.next(unit))
            if self.stored is not None:
                self._gathers[unit.name].wait()  # its buffer is the next one's

    def reshard(self, stage: int) -> None:
        assert self._residency is not None
        for unit in self._residency.free(stage):
            self.units[unit.name].free_slot()

    def reduce(self, stage: int) -> None:
        """Start the reduction of a stage's gradients over the data ranks."""
        for part in reversed(self.plan.stages[stage]):
            self._reduce(part)

    def tied_gradients(self) -> Tensor:
        """The reduced gradients of the tied table; the other end of the pipeline has the same interval."""
        for pending in self._reductions.values():
            pending.wait()
        return self.units["tied"].grads_interval

    def _reduce_scatter(self, flat: FlatUnit, full: Buffer, hop: Hop) -> None:
        """Start the reduction of a unit's full gradients; staged ones are freed by it.

        Where peers read them in place, the rank that comes last finds all there and adds up at once, so that ranks need
        not go in step; its accumulator must be there before.
        """
        name, target = flat.unit.name, flat.reduced() if full.lasting else None
        into = flat.reduced if target is None else lambda: target
        earlier = list(self._reductions.values())
        if not full.lasting:
            for pending in earlier:
                pending.wait()  # one scratch buffer: the previous reduction must have left it
        done = full.free if full is flat.staging else None
        reduction = self.comms.reduce_scatter(full.tensor, hop.axes, name, into, done=done, later=True)
        self._reductions[name] = reduction
        for pending in earlier:  # in lasting buffers peers already read the new one
            pending.wait()
        # A measured step does the same at the same moments each time.
        if full.lasting and not self.comms.pause and reduction.is_completed():
            reduction.wait()

    def _sum_packed(self, flat: FlatUnit, full: Buffer) -> None:
        """Start the reduction of a unit's full gradients in 4 bits. One room for packed pieces: the sum before must
        have left it."""
        for pending in self._reductions.values():
            pending.wait()
        room = self._room.take(self._buffers.room(self.plan, flat.unit))

        def done() -> None:
            self._room.free()
            if full is flat.staging:
                full.free()

        self._reductions[flat.unit.name] = PackedSum(
            self.comms, flat.unit, full.tensor, room, flat.reduced, done, flat.residuals
        )

    def finish_step(self) -> None:
        """All backwards are over: wait for the reductions, and take the hops that follow them (HSDP)."""
        for pending in self._reductions.values():
            pending.wait()
        self._reductions.clear()
        with self.comms.in_phase("backward"):
            sums = [
                (flat.grads_interval, self.comms.reachable(flat.grads_interval), hop, name)
                for name, flat in self.units.items()
                for hop in flat.unit.reduce[1:]
                if hop.op == "all_reduce"
            ]
            pendings = [self.comms.all_reduce(moved, hop.axes, name, later=True) for _, moved, hop, name in sums]
        for pending, (own, moved, *_) in zip(pendings, sums, strict=True):
            pending.wait()
            if moved is not own:
                own.copy_(moved)

    def all_gather_params(self) -> None:
        """After the optimizer: stages 1 and 2 gather the new parameters, stage 3 forgets what is resident, packed and
        copied."""
        self._gathers.clear()
        self._packed.clear()
        self._gathers_of_step = StepGathers(self.plan)
        if self.stage in (1, 2):
            with self.comms.in_phase("optimizer"):
                pendings = [self._start(gather_of(self.plan, flat.unit)) for flat in self.trained]
            for pending in pendings:
                pending.wait()

    # -- what it holds

    def lasting(self) -> set[int]:
        """Storages of its own, which outlive what backward saves of them."""
        return {tensor.untyped_storage()._cdata for tensors in self.storages().values() for tensor in tensors}

    def storages(self) -> dict[str, list[Tensor]]:
        """Class of bytes -> the tensors whose storages belong to it, for the memory report; "offloaded": those in the
        host's memory, beside gradients that are."""
        flats = list(self.units.values())
        weights = [flat.interval if self.stage == 3 else flat.whole for flat in flats if self.stored is None]
        weights += [flat.copy for flat in flats if flat.copy is not None]
        packed = [flat.packed.own for flat in flats if flat.packed is not None]
        for errors in (flat.residuals for flat in flats if flat.residuals is not None):
            packed += [errors.first, errors.second]
        staging = [flat.staging for flat in flats if flat.staging is not None]
        buffers = [*self._slots.values(), *self._wires.values(), *staging]
        return {
            "parameters": weights,
            "gradients": [flat.grads.tensor for flat in self.trained],
            "offloaded": [*(flat.interval for flat in flats if self.stored is not None), *self._buffers_on_host()],
            "comm": [*(buffer.tensor for buffer in buffers), *self._reserved, self._room.tensor, *packed],
        }

    def _buffers_on_host(self) -> list[Tensor]:
        return [
            *(self.file.buffers if self.file is not None else []),
            *(self.stored.buffers.values() if self.stored is not None else []),
        ]


def _leaf(weight: Tensor, grad_slot: GradSlot | None) -> nn.Parameter:
    """A parameter on the memory of `weight`, with a version counter of its own. grad_slot: None where nothing trains.

    Autograd would otherwise refuse a weight that was gathered again between its forward and its backward, though the
    slot then holds the same values as before.
    """
    own = torch.empty(0, dtype=weight.dtype, device=weight.device)
    own.set_(weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride())
    parameter = nn.Parameter(own, requires_grad=grad_slot is not None)
    if grad_slot is not None:
        bind_grad_slot(parameter, grad_slot)
    return parameter
