"""Memory that a pipeline's ranks hold for backward: how many micro-batches, waiting for what, and how many bytes.

A rank works through its list one computation after the other, so that what it holds at each of them does not depend on
how long things take.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple, Self

from shardwise.schedule.pipeline.action import COMPUTE, Action
from shardwise.schedule.pipeline.plan import PipelineSchedule


@dataclass(frozen=True)
class MicroBatchMemory:
    """Memory of one micro-batch on each stage, in bytes or any other unit.

    saved: from F until I or B; with recompute, only what that starts from. weight: from I until W (inputs and output
    gradients of the weights; I frees the rest of `saved`). rebuilt: besides, while I or B runs (recompute).
    """

    saved: tuple[float, ...]
    weight: tuple[float, ...]
    rebuilt: tuple[float, ...]

    @classmethod
    def shared(
        cls,
        schedule: PipelineSchedule,
        saved: float = 1,
        weight: float = 1,
        rebuilt: float = 0,
        shares: Sequence[float] = (),
    ) -> Self:
        """From what a *rank* holds for one micro-batch if the model is split evenly; `shares` as in `Times.shared`."""
        parts = [share * schedule.ranks for share in shares] or [schedule.ranks / schedule.stages] * schedule.stages
        return cls(*(tuple(part * whole for part in parts) for whole in (saved, weight, rebuilt)))


class Peak(NamedTuple):
    """The most that a rank holds at a time.

    forward: micro-batches (each stage's counted) between F and I; weight: between I and W; both: of either kind.
    held: in the unit of `MicroBatchMemory`, what is rebuilt included. buffers: receives that are posted and not yet
    used up.
    """

    forward: int
    weight: int
    both: int
    held: float
    buffers: int


class Level(NamedTuple):
    """Micro-batches that a rank holds after a computation: `held`, and the most while it ran, `during`. place: the
    action's, in the rank's list."""

    place: int
    forward: int
    weight: int
    held: float
    during: float


def levels(schedule: PipelineSchedule, rank: int, held: MicroBatchMemory | None = None) -> Iterator[Level]:
    """Micro-batches that a rank holds, one computation after the other."""
    held = held or MicroBatchMemory.shared(schedule)
    forward = weight = 0
    now = 0.0
    for index, action in enumerate(schedule.actions[rank] if schedule.train else ()):
        if action[0] not in COMPUTE:
            continue
        during = now
        for kind, stage, _, _, _ in action[4] or (action,):
            saved, kept = held.saved[stage], held.weight[stage]
            if kind == "F":
                forward, now, during = forward + 1, now + saved, during + saved
            elif kind == "I":
                forward, weight, now = forward - 1, weight + 1, now + kept - saved
                during += max(held.rebuilt[stage], kept - saved)
            elif kind == "W":
                weight, now = weight - 1, now - kept
            else:
                forward, now, during = forward - 1, now - saved, during + held.rebuilt[stage]
        yield Level(index, forward, weight, now, during)


def peaks(schedule: PipelineSchedule, held: MicroBatchMemory | None = None) -> list[Peak]:
    """The most that each rank holds. Without `held` in shares of what a rank saves for one micro-batch."""
    return [peak(mine, levels(schedule, rank, held)) for rank, mine in enumerate(schedule.actions)]


def peak(mine: tuple[Action, ...], found: Iterable[Level]) -> Peak:
    """The most of a rank's levels. mine: its list."""
    rows = list(found)
    # The F of an overlapped pair saves before the B frees.
    forward = [0, *(level.forward + bool(mine[level.place].parts) for level in rows)]
    weight = [0, *(level.weight for level in rows)]
    held = max((max(level.held, level.during) for level in rows), default=0.0)
    return Peak(max(forward), max(weight), max(map(add, forward, weight)), held, _buffers(mine))


def _buffers(mine: tuple[Action, ...]) -> int:
    """The most receives that are posted and whose computation has not ended."""
    posted: set[tuple[str, int, int]] = set()
    most = 0
    for action in mine:
        if action.kind in ("RECV_F", "RECV_B"):
            posted.add((action.kind[-1], action.stage, action.micro))
            most = max(most, len(posted))
        elif action.kind in COMPUTE:
            for part in action.leaves():
                if part.kind != "W":
                    posted.discard(("F" if part.kind == "F" else "B", part.stage, part.micro))
    return most
