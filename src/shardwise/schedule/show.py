"""A schedule as people read it, and as frames that a page animates.

Both tell, after every round, whose data each chunk of each rank holds, as long as the ranks are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardwise.report.units import format_spans
from shardwise.schedule.comm import CommSchedule, Round
from shardwise.schedule.provenance import Holding, history

FRAMES_VERSION = 1
MOST_FRAMED = 32
"""Ranks up to which frames carry what every chunk holds."""
MOST_SHOWN = 8
"""Ranks, and chunks of memory, up to which `describe` prints what every chunk holds."""


def describe(schedule: CommSchedule, elements: int) -> Iterator[str]:
    """The lines of `shardwise collective show`: every round with its transfers, in chunks and elements."""
    yield _headline(schedule, elements)
    small = schedule.ranks <= MOST_SHOWN and schedule.width <= 2 * MOST_SHOWN
    states = history(schedule) if small else None
    if states:
        yield ""
        yield "at the start every chunk holds the data of"
        yield from _table(schedule, next(states))
    for number, (round, label) in enumerate(zip(schedule.rounds(), schedule.labels(), strict=True)):
        yield ""
        yield f"round {number}: {label}"
        yield from (f"  {line}" for line in _transfers(schedule, round, elements))
        if states:
            yield from _table(schedule, next(states))
    yield ""
    yield f"the result is in {schedule.result!r}" if len(schedule.regions) > 1 else "the result is where the data was"


def frames(schedule: CommSchedule, elements: int) -> dict[str, Any]:
    """The schedule as JSON for a page: one frame for the start, and one for each round with the state after it.

    bounds: where the chunks of a rank's memory begin, in elements. holds: rank -> chunk -> list of [rank, chunk], the
    inputs that were added up there, or null for nothing yet; null as a whole above `MOST_FRAMED` ranks.
    """
    states = history(schedule) if schedule.ranks <= MOST_FRAMED else None
    bounds = schedule.bounds(elements)
    found: list[dict[str, Any]] = [{"round": None, "stage": "start", "transfers": [], "holds": _holds(states)}]
    for number, (round, label) in enumerate(zip(schedule.rounds(), schedule.labels(), strict=True)):
        transfers = [
            {
                "src": src,
                "dst": dst,
                "chunks": list(range(chunk, chunk + count * stride, stride)),
                "to": list(range(to, to + count * stride, stride)),
                "op": "add" if adds else "copy",
                "elements": int(np.diff(bounds)[chunk : chunk + count * stride : stride].sum()),
            }
            for src, dst, chunk, to, count, stride, adds in round.rows()
        ]
        found.append({"round": number, "stage": label, "transfers": transfers, "holds": _holds(states)})
    return {
        "frames_version": FRAMES_VERSION,
        "collective": schedule.collective,
        "algorithm": schedule.algorithm,
        "options": dict(schedule.options),
        "root": schedule.root,
        "ranks": schedule.ranks,
        "elements": elements,
        "chunks": schedule.chunks,
        "regions": list(schedule.regions),
        "result": schedule.result,
        "bounds": bounds.tolist(),
        "frames": found,
    }


def _holds(states: Iterator[list[list[Holding]]] | None) -> list[list[list[list[int]] | None]] | None:
    if states is None:
        return None
    return [[None if held is None else [list(part) for part in held] for held in row] for row in next(states)]


def _headline(schedule: CommSchedule, elements: int) -> str:
    sizes = np.diff(schedule.bounds(elements))[: schedule.chunks]
    least, most = int(sizes.min()), int(sizes.max())
    each = f"{most}" if least == most else f"{least} or {most}"
    options = "".join(f", {name} {value}" for name, value in schedule.options.items() if value)
    chunks = "1 chunk" if schedule.chunks == 1 else f"{schedule.chunks} chunks"
    rounds = "1 round" if schedule.steps == 1 else f"{schedule.steps} rounds"
    return (
        f"{schedule.name}{options}: {schedule.ranks} ranks, {rounds}; "
        f"{elements} elements in {chunks} of {each}; memory: {', '.join(schedule.regions)}"
    )


def _transfers(schedule: CommSchedule, round: Round, elements: int) -> Iterator[str]:
    bounds = schedule.bounds(elements)
    for src, dst, chunk, to, count, stride, adds in round.rows():
        chunks = tuple(range(chunk, chunk + count * stride, stride))
        size = int(sum(bounds[c + 1] - bounds[c] for c in chunks))
        where = "" if to == chunk else f" to {_place(schedule, tuple(range(to, to + count * stride, stride)))}"
        way = f"rank {src} → rank {dst}" if src != dst else f"rank {src}, by itself"
        unit = "element" if size == 1 else "elements"
        yield f"{way}: {'add' if adds else 'copy'} {_place(schedule, chunks)}{where} ({size} {unit})"


def _place(schedule: CommSchedule, chunks: tuple[int, ...]) -> str:
    region = chunks[0] // schedule.chunks
    within = tuple(chunk - region * schedule.chunks for chunk in chunks)
    name = f"chunk{'s' if len(within) > 1 else ''} {format_spans(within)}"
    return name if region == 0 else f"{name} of {schedule.regions[region]}"


def _table(schedule: CommSchedule, held: list[list[Holding]]) -> Iterator[str]:
    """One line a rank, one column a chunk: the ranks whose data it holds."""
    head = ["", *(_heading(schedule, chunk) for chunk in range(schedule.width))]
    rows = [head, *([f"rank {rank}", *map(_ranks, row)] for rank, row in enumerate(held))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _heading(schedule: CommSchedule, chunk: int) -> str:
    region, within = divmod(chunk, schedule.chunks)
    return str(within) if region == 0 else f"{schedule.regions[region]} {within}"


def _ranks(holding: Holding) -> str:
    return "·" if holding is None else format_spans(tuple(rank for rank, _ in holding))
