"""A pipeline as people read it: a grid of ranks and time, and a plot of bubbles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwise.schedule.pipeline.action import COMPUTE, Action
from shardwise.schedule.pipeline.plan import PipelineSchedule
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times

MOST_CELLS = 400
"""Time units up to which a grid is drawn."""

_MARKS = "●■▲◆○□△◇✚✖✦"


def grid(schedule: PipelineSchedule) -> Iterator[str]:
    """One line a rank, one column a time unit, where F, I and W of each stage take one (B takes two).

    Empty where there are more than `MOST_CELLS` units.
    """
    simulated = simulate(schedule, Times.equal(schedule.stages, 1, 1, 1))
    units = int(simulated.makespan)
    if units > MOST_CELLS:
        return
    labels = [[_label(schedule, a) for a in mine if a.kind in COMPUTE] for mine in schedule.actions]
    spans = [[(int(a), int(b)) for a, b in mine] for mine in simulated.computing]
    width = 1 + max(
        -(-len(label) // (end - start))
        for named, timed in zip(labels, spans, strict=True)
        for label, (start, end) in zip(named, timed, strict=True)
    )
    for rank, (named, timed) in enumerate(zip(labels, spans, strict=True)):
        line, at = "", 0
        for label, (start, end) in zip(named, timed, strict=True):
            line += "·".ljust(width) * (start - at) + label.ljust((end - start) * width)
            at = end
        yield f"rank {rank:<2} {line}{'·'.ljust(width) * (units - at)}".rstrip()


def _label(schedule: PipelineSchedule, action: Action) -> str:
    """F3, or with the stage where a rank has several: 4F3, 4F3+3B1."""
    plain = schedule.virtual == 1
    return "+".join(f"{'' if plain else leaf.stage}{leaf.kind}{leaf.micro}" for leaf in action.leaves())


def plot(
    curves: Mapping[str, Sequence[tuple[int, float]]], width: int = 64, height: int = 16, wanted: float | None = None
) -> Iterator[str]:
    """Bubbles (fractions) over micro-batches as lines of text: name -> (micro-batches, bubble), ascending.

    wanted: drawn as a line of dashes. Where curves meet, the one named first is seen.
    """
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return
    first, last = min(m for m, _ in points), max(m for m, _ in points)
    top = max(max(bubble for _, bubble in points), wanted or 0) or 1.0

    def place(m: int, bubble: float) -> tuple[int, int]:
        return round((m - first) / max(1, last - first) * (width - 1)), round(bubble / top * height)

    rows = [[" "] * width for _ in range(height + 1)]
    if wanted is not None:
        rows[place(first, wanted)[1]] = ["╌"] * width
    for mark, curve in reversed(list(zip(_MARKS, curves.values(), strict=False))):
        for m, bubble in curve:
            x, y = place(m, bubble)
            rows[y][x] = mark
    for y in range(height, -1, -1):
        share = f"{100 * top * y / height:5.1f}% " if y % 4 == 0 else " " * 7
        yield f"{share}│{''.join(rows[y])}".rstrip()
    yield " " * 7 + "└" + "─" * width
    yield " " * 8 + f"{first}{f'{last} micro-batches':>{width - len(str(first))}}"
    yield " " * 8 + "  ".join(f"{mark} {name}" for mark, name in zip(_MARKS, curves, strict=False))
