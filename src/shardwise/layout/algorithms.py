"""The schedule that a layout's key `algorithm=` gives a collective: one choice, which runtime and prediction share.

All-reduce, all-gather and reduce-scatter of training run the named algorithm where the collective has it and its group
suits it; every other collective runs as `algorithm=auto` does. A reduce-scatter of bf16 is summed, and sent, in fp32,
but by NCCL: its sum is rounded once, as under auto. All other sums have the tensor's dtype. The order of additions is
the schedule's, so that bits differ from auto's; verification proves that all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import UserError
from shardwise.layout.algorithm_names import COLLECTIVES
from shardwise.layout.axes import Axes
from shardwise.layout.mesh import Mesh
from shardwise.report.step_report import DTYPE_BYTES

if TYPE_CHECKING:
    from shardwise.layout.layout import Layout
    from shardwise.schedule import CommSchedule
    from shardwise.schedule.traffic import Moved


class Carried(NamedTuple):
    """A collective that a schedule runs."""

    schedule: CommSchedule
    dtype: str
    """dtype of the sums and on the wire."""
    elements: int
    """Elements of the full tensor."""
    shared: bool
    """Whether it goes window by window, as where ranks read each other's memory; else one run by sends."""

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(start, width) of each run of the schedule, in elements of the tensor, or of each rank's piece."""
        from shardwise.schedule.traffic import windows

        if self.shared:
            return windows(self.schedule, self.elements, DTYPE_BYTES[self.dtype])
        return [(0, self.elements // self.pieces)] if self.elements else []

    @property
    def pieces(self) -> int:
        return 1 if self.schedule.collective == "all-reduce" else self.schedule.ranks

    @property
    def room(self) -> int:
        """Bytes for staged and packed messages of sends; shared memory has its own windows."""
        from shardwise.schedule.sending import room

        return 0 if self.shared else room(self.schedule, self.elements) * DTYPE_BYTES[self.dtype]

    def wide(self, dtype: str) -> int:
        """Bytes of the fp32 copy of a tensor of `dtype` that is summed there: of its largest run."""
        if dtype == self.dtype:
            return 0
        return max((width for _, width in self.runs), default=0) * self.pieces * DTYPE_BYTES[self.dtype]

    def moved(self, rank: int) -> Moved:
        """Bytes that the group's `rank` sends, and its steps, in all runs."""
        from shardwise.schedule.traffic import Moved, moved

        item = DTYPE_BYTES[self.dtype]
        parts = [moved(self.schedule, width * self.pieces, item, rank) for _, width in self.runs]
        return Moved(sum(part.nbytes for part in parts), sum(part.steps for part in parts))


class Schedules:
    """The schedules of one layout's collectives. backend: what carries them (`units.Backend`)."""

    def __init__(self, mesh: Mesh, backend: str) -> None:
        self.mesh, self.backend = mesh, backend
        self._found: dict[tuple[str, Axes], CommSchedule | None] = {}

    @cached_property
    def named(self) -> bool:
        return self.mesh.layout.algorithm != "auto"

    def of(self, op: str, axes: Axes) -> CommSchedule | None:
        """The schedule of a ledger's operation over a group; None where it runs as under auto."""
        if (op, axes) not in self._found:
            # Every group of the axes has the first one's schedule, so that all ranks agree.
            self._found[op, axes] = schedule_of(self.mesh.layout, op, sorted(self.mesh.group(axes, 0)))
        return self._found[op, axes]

    def carried(self, op: str, axes: Axes, dtype: str, elements: int) -> Carried | None:
        """Schedule of one collective on a full tensor; None as under auto."""
        schedule = self.of(op, axes)
        if schedule is None:
            return None
        widens = op == "reduce_scatter" and dtype == "bfloat16" and self.backend != "nccl"
        return Carried(schedule, "float32" if widens else dtype, elements, self.backend in ("shared", "staged"))


def schedule_of(layout: Layout, op: str, group: Sequence[int]) -> CommSchedule | None:
    """The schedule of a ledger's operation over a group of ranks; None where it runs as under auto."""
    if layout.algorithm == "auto" or op not in COLLECTIVES:
        return None
    return _schedule(op, layout.algorithm, len(group), _per_node(group, layout.node))


def _per_node(group: Sequence[int], node: int) -> int:
    """Ranks of the group on each node of `node` ranks; 0 where nodes have unequal parts of it, or it has one node."""
    if not node:
        return 0
    places = [rank // node for rank in group]
    counts = {places.count(place) for place in places}
    least = min(counts)
    return least if len(counts) == 1 and 1 < least < len(group) else 0


@lru_cache(maxsize=256)
def _schedule(op: str, name: str, ranks: int, per_node: int) -> CommSchedule | None:
    from shardwise.schedule.algorithms import build, find

    collective = COLLECTIVES[op]
    try:
        algorithm = find(collective, name)
    except UserError:
        return None
    layered = "node" in algorithm.options
    if ranks == 1 or (algorithm.most and ranks > algorithm.most) or (layered and not per_node):
        return None
    schedule = build(collective, name, ranks, **({"node": per_node} if layered else {}))
    # Memory beside the tensor is not there in training.
    return schedule if schedule.regions == ("data",) else None
