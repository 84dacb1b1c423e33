"""Gathers of a rank's units, and the uses of its parts that they precede.

At stage 3 units live in *slots*, two buffers that they take in turn, so at most two are resident: the one in use and
the one prefetched. The large edges of the model, embedding and head, share the outer slot; blocks alternate between
inner and outer, and the last one is inner, so that the head can be fetched while it computes. A tied weight has a slot
of its own and stays for the whole micro-batch, and so does the root of a user's module. A unit's weights therefore
always appear at the same address, and a unit that is still in its slot is not gathered again.

Under a pipeline the schedule says when stages are gathered and freed, so that each unit has a slot of its own
(`Residency`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Literal

from shardwise.layout import pipeline
from shardwise.layout.step import count_step
from shardwise.layout.unit import WEIGHT_BITS, Gather, Unit
from shardwise.layout.units import UnitPlan
from shardwise.layout.wire import WIRE_DTYPE
from shardwise.records import dataclass
from shardwise.report.step_report import DTYPE_BYTES

Phase = Literal["forward", "backward", "prefill", "decode"]


@dataclass(frozen=True)
class Use:
    """One visit of a part in a micro-batch. `gathers`: of units that are not resident already."""

    phase: Phase
    kind: Literal["forward", "recompute", "backward"]
    part: str
    gathers: tuple[Gather, ...] = ()


def slot_elements(plan: UnitPlan) -> dict[str, int]:
    """Slot -> elements of the largest unit in it."""
    sizes: dict[str, int] = {}
    for unit in plan.units:
        sizes[unit.slot] = max(sizes.get(unit.slot, 0), unit.padded)
    return sizes


def slot_dtypes(plan: UnitPlan) -> dict[str, str]:
    """Slot -> its dtype."""
    return {unit.slot: plan.dtypes.gathered(unit) for unit in plan.units}


def slot_bytes(plan: UnitPlan) -> int:
    """Bytes of all slots."""
    dtypes = slot_dtypes(plan)
    return sum(elements * DTYPE_BYTES[dtypes[slot]] for slot, elements in slot_elements(plan).items())


def packed_slot_bytes(plan: UnitPlan) -> dict[str, int]:
    """Slot -> bytes of its buffer of packed weights; none where they are gathered as they are."""
    sizes: dict[str, int] = {}
    for unit in plan.units:
        if packed := packed_bytes(plan, unit):
            sizes[unit.slot] = max(sizes.get(unit.slot, 0), packed * unit.shard_ranks)
    return sizes


def step_uses(plan: UnitPlan, passes: int = 1) -> list[Use]:
    """Every visit of one micro-batch in order, without the gathers. A root, which computes around all other parts,
    is the first in both directions. passes: forward passes with gradients, whose backward passes come latest
    first."""
    forward = passes * [Use("forward", "forward", part) for part in plan.parts]
    backward, blocks = [], plan.of_kind("block")
    inner = passes * [part for part in reversed(plan.parts) if plan.blueprint.kind(part) != "root"]
    for part in plan.of_kind("root") + inner:
        if plan.layout.recompute == "input" and part in blocks:
            backward += [Use("backward", "recompute", before) for before in blocks[: blocks.index(part)]]
        backward.append(Use("backward", "backward", part))
    return forward + backward


def gathering_uses(plan: UnitPlan, passes: Sequence[int] = ()) -> Iterator[list[Use]]:
    """For each micro-batch of a step, its uses with the units that stage 3 gathers for each. passes: of each
    micro-batch, where some have more than one.

    Residency decides: a slot remembers its unit until another one takes it. The optimizer step, which precedes
    the first micro-batch, empties all slots. The embedding's backward reads no weight.
    """
    resident: dict[str, str] = {}
    gathers = StepGathers(plan)
    for count in passes or plan.micro_batches * (1,):
        yield _gathering(plan, step_uses(plan, count), resident, gathers.next)


def generating_uses(plan: UnitPlan, phase: Phase) -> tuple[list[Use], list[Use]]:
    """The uses of a turn of generation with the units that stage 3 gathers for each: of the first turn, and of
    every later one, which finds in the slots what the turn before has left there."""
    resident: dict[str, str] = {}
    parts = [Use(phase, "forward", part) for part in plan.parts]
    first, later = (_gathering(plan, parts, resident, partial(gather_of, plan)) for _ in range(2))
    return first, later


def _gathering(plan: UnitPlan, uses: list[Use], resident: dict[str, str], of: Callable[[Unit], Gather]) -> list[Use]:
    """Uses with their gathers. resident: slot -> the unit in it; of: the gather of a unit."""
    gathering = []
    for use in uses:
        gathers = []
        looks_up = plan.blueprint.kind(use.part) == "embedding"
        for unit in [] if use.kind == "backward" and looks_up else plan.units_of(use.part):
            if resident.get(unit.slot) != unit.name:
                resident[unit.slot] = unit.name
                gathers.append(of(unit))
        gathering.append(Use(use.phase, use.kind, use.part, tuple(gathers)))
    return gathering


def gather_of(plan: UnitPlan, unit: Unit, again: bool = False) -> Gather:
    """The gather of a unit's parameters. again: it has been gathered in this step before."""
    if again and unit.copy_ranks:
        return Gather(unit.name, unit.again, plan.dtypes.gathered(unit))
    return Gather(unit.name, unit.sharded_over, WIRE_DTYPE if packed_bytes(plan, unit) else plan.dtypes.gathered(unit))


def packed_bytes(plan: UnitPlan, unit: Unit) -> int:
    """Bytes of one rank's interval in 8 bits, with its scales; 0 where a unit is not gathered so."""
    quantized = plan.layout.qwz and plan.trains and unit.shard_ranks > 1 and not unit.dtype
    return unit.packed_bytes(WEIGHT_BITS) if quantized else 0


def gathered_elements(plan: UnitPlan, gather: Gather) -> int:
    """Elements of a gather's full tensor, in its own dtype."""
    unit = plan.by_name[gather.unit]
    return packed_bytes(plan, unit) * unit.shard_ranks if gather.dtype == WIRE_DTYPE else unit.padded


def gather_counts(plan: UnitPlan) -> Counter[tuple[str, Gather]]:
    """(phase, gather) -> times per step: after the update at stages 1 and 2, for each use at stage 3."""
    return count_step(plan, _gathers_one_by_one)


def _gathers_one_by_one(plan: UnitPlan) -> Counter[tuple[str, Gather]]:
    if plan.layout.stage < 3:
        trained = [unit for unit in plan.units if plan.layout.stage and not unit.frozen]
        return Counter(("optimizer", gather_of(plan, unit)) for unit in trained)
    if not plan.pipeline.staged:
        uses = chain.from_iterable(gathering_uses(plan))
        return Counter((use.phase, gather) for use in uses for gather in use.gathers)
    found: Counter[tuple[str, Gather]] = Counter()
    residency, gathers = Residency(plan), StepGathers(plan)
    for action, phase in zip(plan.pipeline.actions, pipeline.phases(plan.pipeline.actions), strict=True):
        if action.kind == "UNSHARD":
            found.update((phase, gathers.next(unit)) for unit in residency.gather(action.stage))
        elif action.kind == "RESHARD":
            residency.free(action.stage)
    return found


def stage_units(plan: UnitPlan) -> dict[int, list[Unit]]:
    """Stage -> the units whose weights its parts read."""
    return {
        stage: list({unit.name: unit for part in held for unit in plan.units_of(part)}.values())
        for stage, held in plan.stages.items()
    }


class StepGathers:
    """The gathers of one step in order: which one a unit's next is."""

    def __init__(self, plan: UnitPlan) -> None:
        self._plan, self._seen = plan, set[str]()

    def next(self, unit: Unit) -> Gather:
        again = unit.name in self._seen
        self._seen.add(unit.name)
        return gather_of(self._plan, unit, again)


class Residency:
    """Gathered units of ZeRO stage 3 while a pipeline gathers and frees its stages.

    A unit of two stages (a tied table) stays gathered as long as either stage does.
    """

    def __init__(self, plan: UnitPlan) -> None:
        self._units = stage_units(plan)
        self._users: Counter[str] = Counter()

    def gather(self, stage: int) -> list[Unit]:
        """The stage is to be there: the units that are not yet."""
        return self._change(stage, 1, at=0)

    def free(self, stage: int) -> list[Unit]:
        """The stage may go: the units that no other stage needs."""
        return self._change(stage, -1, at=1)

    def _change(self, stage: int, by: int, at: int) -> list[Unit]:
        users, found = self._users, []
        for unit in self._units[stage]:
            if users[unit.name] == at:
                found.append(unit)
            users[unit.name] += by
        return found
