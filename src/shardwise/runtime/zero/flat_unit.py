"""One unit's flat buffers on one rank: parameters, gradients, and their initial values.

Values of a frozen base in fewer bits, from those of its weights: of the whole matrix, so that numbers and scales are
equal under every layout.
"""

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from shardwise.decoder.bases import quantized
from shardwise.layout.axes import Axes
from shardwise.layout.gradients import residuals
from shardwise.layout.homes import accumulates_on_host
from shardwise.layout.placement import Box, Placed
from shardwise.layout.unit import WEIGHT_BITS, Unit
from shardwise.layout.units import UnitPlan
from shardwise.model.adapters import is_narrow, is_scale, scale_of
from shardwise.model.lora import BASES
from shardwise.model.parameters import Parameter
from shardwise.ops.gradients import GradSlot
from shardwise.runtime.offload.file import OffloadFile
from shardwise.runtime.transport.buffers import Buffer, ByteCounter, Target
from shardwise.runtime.zero.packed_sum import Residuals
from shardwise.runtime.zero.quantized import pack, unpack


class PackedWeights:
    """A rank's packed interval, which stays for all gathers of a step, and the buffer where all ranks' come together.

    place: of this rank's interval among those of the unit. wire: for the packed intervals of all ranks.
    """

    def __init__(self, unit: Unit, place: int, wire: Buffer, device: torch.device, tally: ByteCounter) -> None:
        nbytes = unit.packed_bytes(WEIGHT_BITS)
        self.own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._unit, self._place = unit, place
        self._gathered, self._wire = nbytes * unit.shard_ranks, wire
        tally.add("comm", nbytes)

    def quantize(self, interval: Tensor) -> None:
        for run in self._unit.packed_runs(self._place, WEIGHT_BITS):
            pack(interval[run.elements], WEIGHT_BITS, self.own[run.packed])

    def take(self) -> Tensor:
        return self._wire.take(self._gathered)

    def unpack(self, whole: Tensor) -> None:
        """The whole unit from what was gathered. A lasting buffer is then free again."""
        pieces = self._wire.tensor[: self._gathered].split(len(self.own))
        for place, (packed, piece) in enumerate(zip(pieces, whole.chunk(len(pieces)), strict=True)):
            for run in self._unit.packed_runs(place, WEIGHT_BITS):
                unpack(packed[run.packed], WEIGHT_BITS, piece[run.elements])
        if self._wire.lasting:
            self.free()

    def free(self) -> None:
        self._wire.free()


Values = Callable[[Parameter, Tensor], Tensor]
"""(parameter, row-major global positions) -> float64 values: where initial weights come from."""


HOST = torch.device("cpu")
FILLED = 1 << 24
"""Elements per block of initial values: each needs several 64-bit counters."""


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class FlatUnit:
    """The buffers of one unit on one rank.

    whole: the flat buffer that parameters are views of, padded (a slot at stage 3). interval: this rank's ZeRO
    interval of it, the same memory as `whole` below stage 3; at stage 3 it is in the optimizer's precision (fp32 for
    bf16), and each gather sends it rounded. With offloaded state it is in compute precision, here, in the host's
    memory, or in `file` and then empty here. grads: the accumulator, whole or interval by stage.
    wire: where packed weights come together under qwz.
    copy: this rank's part of the second copy under hpz. residuals: errors of packed gradients, where they are fed back.
    staging: the full gradient in compute precision that autograd adds into, where that is not the accumulator.
    A plan without a training step has no gradients. Neither has a frozen unit, whose interval is in compute precision.
    """

    def __init__(
        self,
        unit: Unit,
        plan: UnitPlan,
        slot: Buffer | None,
        wire: Buffer | None,
        staging: Buffer | None,
        index: Callable[[Axes], int],
        device: torch.device,
        tally: ByteCounter,
        host: ByteCounter,
        file: OffloadFile | None = None,
    ) -> None:
        self.unit, self.plan, self.slot, self.staging = unit, plan, slot, staging
        n = unit.shard_numel
        place = index(unit.sharded_over)
        self.start, self.stop = place * n, (place + 1) * n
        self.file = file if plan.layout.params_on_disk else None
        if slot is not None:
            self.whole = slot.tensor[: unit.padded]
            self.interval = self._interval(device, host)
        else:
            self.whole = torch.zeros(unit.padded, dtype=torch_dtype(plan.dtypes.gathered(unit)), device=device)
            self.interval = self.whole[self.start : self.stop]
        self.packed = None
        if wire is not None:
            self.packed = PackedWeights(unit, place, wire, device, tally)
        sizes = residuals(plan, unit)
        self.residuals = Residuals(unit, sizes, device, tally) if any(sizes) else None
        self.copy: Tensor | None = None
        if unit.copy_ranks:
            self.copy = torch.zeros(unit.copy_numel, dtype=self.whole.dtype, device=device)
            at = index(unit.again) * unit.copy_numel
            self._copied = self.whole[at : at + unit.copy_numel]
        self.trains = plan.trains and not unit.frozen
        if self.trains:
            elements = n if plan.layout.stage >= 2 else unit.padded
            if accumulates_on_host(plan):
                self.grads = Buffer("gradients", elements, torch_dtype(plan.dtypes.gradients), HOST, host)
            else:
                self.grads = Buffer("gradients", elements, torch_dtype(plan.dtypes.gradients), device, tally)
        self.grad_slots: list[GradSlot] = []
        self._overwritten: list[GradSlot] = []
        self._added_to: list[Tensor] = []

    def _interval(self, device: torch.device, host: ByteCounter) -> Tensor:
        """Memory for this rank's interval at stage 3; empty where it is in a file."""
        home = self.plan.layout.offload_params
        elements = 0 if home == "nvme" else self.unit.shard_numel
        at = device if home == "none" else HOST
        interval = torch.zeros(elements, dtype=torch_dtype(self.plan.dtypes.of(self.unit)), device=at)
        if home != "none":
            host.add("parameters", interval.nbytes)
        return interval

    def put(self, start: int, values: Tensor) -> None:
        """Set elements of this rank's interval, from `start` on, to values in the optimizer's precision."""
        if self.file is None:
            self.interval[start : start + len(values)].copy_(values)
        else:
            self.file.put_parameters(self.unit.name, start, values)

    @property
    def grads_interval(self) -> Tensor:
        grads = self.grads.tensor
        return grads if self.plan.layout.stage >= 2 else grads[self.start : self.stop]

    def fill(self, values: Values) -> Tensor:
        """Set the parameters from global values; returns the interval's values in the optimizer's precision.

        Weights are those values rounded, as they will be after every update.
        """
        own = torch.zeros(self.stop - self.start, dtype=torch_dtype(self.plan.dtypes.master), device=self.whole.device)
        for start, placed, first, last in self._chunks():
            a, b = max(start + first, self.start), min(start + last, self.stop)
            if a < b:
                own[a - self.start : b - self.start] = local_values(placed, a - start, b - start, values, own.device)
            if self.plan.layout.stage in (1, 2):
                every = local_values(placed, first, last, values, own.device)
                self.whole[start + first : start + last].copy_(every.to(own.dtype))
        self.put(0, own)
        return own

    def fill_frozen(self, values: Values, which: Callable[[Parameter], bool] = lambda p: True) -> None:
        """Set some frozen parameters from global values, without a copy of the unit in another precision."""
        for start, placed, first, last in self._chunks():
            if not which(placed.parameter):
                continue
            a, b = max(start + first, self.start), min(start + last, self.stop)
            if a < b:
                part = local_values(placed, a - start, b - start, values, self.whole.device)
                self.put(a - self.start, part.to(torch_dtype(self.plan.dtypes.master)))

    def _chunks(self) -> Iterator[tuple[int, Placed, int, int]]:
        """(start in the flat buffer, parameter, first and last + 1 of its local elements) of blocks to fill."""
        for start, placed in zip(self.unit.offsets, self.unit.placed, strict=True):
            for first in range(0, placed.numel, FILLED):
                yield start, placed, first, min(first + FILLED, placed.numel)

    def gathered(self) -> None:
        """A gather over all shards is over: weights that came packed are unpacked, and the second copy is kept."""
        if self.packed is not None:
            self.packed.unpack(self.whole)
        if self.copy is not None:
            self.copy.copy_(self._copied)

    def free_slot(self) -> None:
        assert self.slot is not None
        self.slot.free()
        if self.packed is not None:
            self.packed.free()

    @property
    def full_grads(self) -> Buffer:
        return self.grads if self.staging is None else self.staging

    def make_grad_slots(self, overwrites: Callable[[Placed], bool]) -> list[GradSlot]:
        """A slot for each parameter's gradient. Those which are not overwritten, and the padding, must be emptied."""
        grads = self.full_grads.take()
        self.grad_slots = [
            GradSlot(grads[start : start + placed.numel].view(placed.view))
            for start, placed in zip(self.unit.offsets, self.unit.placed, strict=True)
        ]
        self.overwrite(overwrites)
        self.full_grads.free()
        return self.grad_slots

    def overwrite(self, overwrites: Callable[[Placed], bool]) -> None:
        """Empty only what is not overwritten, from the next `allocate_grads` on."""
        grads, self._overwritten, self._added_to = self.full_grads.tensor, [], []
        at = 0  # start of the span of gradients that autograd adds to
        for start, placed, slot in zip(self.unit.offsets, self.unit.placed, self.grad_slots, strict=True):
            slot.empty = overwrites(placed)
            if slot.empty:
                self._overwritten.append(slot)
                self._added_to += [grads[at:start]] if at < start else []
                at = start + placed.numel
        self._added_to += [grads[at:]] if at < len(grads) else []

    def allocate_grads(self) -> None:
        """Memory for what backward is about to add up, with nothing in it."""
        self.full_grads.take()
        for grad_slot in self._overwritten:
            grad_slot.empty = True
        for span in self._added_to:
            span.zero_()

    def empty_rest(self) -> None:
        """Zero what nothing has been added to: gradients of biases, where only products came after `allocate_grads`."""
        for grad_slot in self._overwritten:
            if grad_slot.empty:
                grad_slot.view.zero_()
                grad_slot.empty = False

    def accumulator(self) -> Target:
        """Target of one micro-batch's gradient: added to the earlier ones, if there are any."""
        return Target(self.grads.tensor, True) if self.grads.held else Target(self.grads.take())

    def reduced(self) -> Target:
        """Target of this rank's interval of the sum over the data ranks."""
        return self.accumulator() if self.plan.layout.stage >= 2 else Target(self.grads_interval)

    def add_gradients(self, piece: Tensor) -> None:
        into, adds = self.accumulator()
        if adds:
            into.add_(piece)
        else:
            into.copy_(piece)


def local_values(placed: Placed, start: int, stop: int, values: Values, device: torch.device) -> Tensor:
    """Values of elements [start, stop) of a parameter's local flat tensor; zero where it is padding."""
    if not placed.dims:
        return values(placed.parameter, torch.arange(start, stop, device=device))
    runs = [
        _values_in(placed, shape, box, max(start - first, 0), min(stop - first, prod(shape)), values, device)
        for first, shape, box in placed.pieces
        if first < stop and start < first + prod(shape)
    ]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def _values_in(
    placed: Placed, shape: tuple[int, ...], box: Box, start: int, stop: int, values: Values, device: torch.device
) -> Tensor:
    """Values of elements [start, stop) of one box of a parameter, of this local shape."""
    local = torch.arange(start, stop, device=device)
    columns = shape[1] if len(shape) == 2 else 1
    (top, bottom), (left, right) = (*box, (0, 1))[:2]
    row, column = local // columns + top, local % columns + left
    valid = (row < bottom) & (column < right)
    global_columns = placed.parameter.shape[1] if len(shape) == 2 else 1
    index = (row * global_columns + column).clamp_(max=placed.parameter.numel - 1)
    return torch.where(valid, values(placed.parameter, index), 0.0)


class BaseValues:
    """`Values` of a plan's parameters, as they are stored. values: of its weights; those in the layout's precision pass
    through."""

    def __init__(self, plan: UnitPlan, values: Values) -> None:
        self._values, self._dtype = values, torch_dtype(plan.layout.dtype)
        narrow = [p for p in plan.blueprint.parameters() if is_narrow(p)]
        self._weights = {name: p for p in narrow for name in (p.name, scale_of(p.name))}
        """Name of stored numbers, or of their scales -> weight."""
        self._scales: dict[str, Tensor] = {}
        """Weight -> its scales."""
        self._latest: tuple[str, Tensor] | None = None
        """The weight that was quantized last, and its numbers."""

    def __call__(self, parameter: Parameter, index: Tensor) -> Tensor:
        weight = self._weights.get(parameter.name)
        if weight is None:
            return self._values(parameter, index)
        asks_scales = is_scale(parameter.name)
        if weight.name not in (self._scales if asks_scales else (self._latest or ())[:1]):
            self._quantize(weight, index.device)
        assert self._latest is not None
        # All of it at once: fake tensors name no elements.
        return (self._scales[weight.name] if asks_scales else self._latest[1]).flatten()[index].double()

    def _quantize(self, weight: Parameter, device: torch.device) -> None:
        outputs, inputs = weight.shape
        columns, block = torch.arange(inputs, device=device), (BASES[weight.dtype].block or (1, 0))[0]
        self._latest = None  # before the next one is made
        some = torch.arange(outputs, device=device).split(block * max(1, FILLED // (inputs * block)))
        rows = (self._values(weight, part[:, None] * inputs + columns) for part in some)
        numbers, self._scales[weight.name] = quantized(weight.dtype, rows, self._dtype)
        self._latest = weight.name, numbers
