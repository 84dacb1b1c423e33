"""Results of `pipeline run` beside the simulation: as JSON, and as tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from shardwise.cli.output import show
from shardwise.codec import keyed
from shardwise.report.table import plain_table
from shardwise.report.units import format_bytes, format_share, format_time
from shardwise.schedule.pipeline.memory import peaks

if TYPE_CHECKING:
    from shardwise.emulate.job import EmulationResult, MeasuredCase
    from shardwise.schedule.pipeline.simulate import Simulated

APART = 1.05
"""Schedules whose simulated makespans differ by more than this factor should be measured in that order."""

Row = dict[str, Any]


def summed_up(result: EmulationResult, hop: float) -> dict[str, Any]:
    """Everything, the schedules by their simulated makespan. hop: seconds of a message in the simulation."""
    overlap = result.transport != "shared"
    rows = sorted((_row(item, hop, overlap) for item in result.cases), key=lambda row: row["simulated"]["makespan_s"])
    return {
        "ranks": result.cases[0].case.schedule.ranks,
        "transport": result.transport,
        "hop_s": hop,
        "cores": len(os.sched_getaffinity(0)),
        "schedules": rows,
        "order": order(rows),
    }


def _row(each: MeasuredCase, hop: float, overlap: bool) -> Row:
    schedule, simulated = each.case.schedule, each.simulated(hop, overlap)
    expected = peaks(schedule, each.case.held)
    return {
        **keyed(schedule, "schedule=name micro virtual"),
        "makespans_s": [step.makespan for step in each.steps],
        "ratio": each.median.makespan / simulated.makespan if simulated.makespan else None,
        "measured": step_json(each.median, held_bytes=each.held, buffers=each.buffers),
        "simulated": step_json(
            simulated, held_bytes=[int(p.held) for p in expected], buffers=[p.buffers for p in expected]
        ),
    }


def totals(step: Simulated) -> dict[str, float]:
    """Times of a step over all ranks."""
    return keyed(step, "makespan_s=makespan bubble_over_ideal=bubble bubble_of_total")


def step_json(step: Simulated, **columns: Sequence[Any]) -> dict[str, Any]:
    """Times of a step, over all ranks and of each. columns: what else there is of each rank."""
    ranks = zip(step.busy, step.idle, step.own_span, step.own_idle, *columns.values(), strict=True)
    names = ("rank", "busy_s", "idle_s", "own_span_s", "own_idle_s", *columns)
    return totals(step) | {
        "by_rank": [dict(zip(names, (rank, *values), strict=True)) for rank, values in enumerate(ranks)]
    }


def order(rows: Sequence[Row]) -> dict[str, Any]:
    """Number of pairs of schedules that the simulation orders, and the pairs that were measured in the other order.

    rows: by simulated makespan.
    """
    simulated, measured = (
        {named(row): row[source]["makespan_s"] for row in rows} for source in ("simulated", "measured")
    )
    apart = [(a, b) for a, b in combinations(simulated, 2) if simulated[b] > APART * simulated[a]]
    return {"pairs": len(apart), "wrong": [pair for pair in apart if measured[pair[0]] >= measured[pair[1]]]}


def named(row: Row) -> str:
    """A row's schedule, with its chunks per rank where there are several."""
    return row["schedule"] + (f" v={row['virtual']}" if row["virtual"] > 1 else "")


def print_one(result: dict[str, Any], title: str) -> None:
    """One schedule, rank by rank."""
    (row,) = result["schedules"]
    measured, simulated = row["measured"], row["simulated"]
    print(title)
    print(_conditions(result))
    times = ", ".join(map(format_time, row["makespans_s"]))
    print(f"makespan {format_time(measured['makespan_s'])} measured, the median of {times}; "
          f"{format_time(simulated['makespan_s'])} simulated; ratio {_ratio(row)}\n")  # fmt: skip
    table = plain_table((), ("rank", "own span", "busy", "bubble", "held", "receives"))
    for local, expected in zip(measured["by_rank"], simulated["by_rank"], strict=True):
        shares = (item["idle_s"] / whole["makespan_s"] if whole["makespan_s"] else 0.0
                  for item, whole in ((local, measured), (expected, simulated)))  # fmt: skip
        cells = [" / ".join(format_time(item[key]) for item in (local, expected)) for key in ("own_span_s", "busy_s")]
        cells.append(" / ".join(map(format_share, shares)))
        cells.append(" / ".join(format_bytes(item["held_bytes"]) for item in (local, expected)))
        cells.append(" / ".join(str(item["buffers"]) for item in (local, expected)))
        table.add_row(str(local["rank"]), *cells)
    show(table)
    show("measured / simulated. bubble: idle time of the makespan; held: bytes saved for backward, at most")


def print_all(result: dict[str, Any]) -> None:
    """Schedules side by side, by their simulated makespan."""
    rows = result["schedules"]
    print(f"{result['ranks']} ranks, {_conditions(result)}\n")
    table = plain_table([""], ("makespan", "ratio", "bubble", "held"))
    for row in rows:
        both = row["measured"], row["simulated"]
        cells = [
            " / ".join(format_time(item["makespan_s"]) for item in both),
            _ratio(row),
            " / ".join(format_share(item["bubble_of_total"]) for item in both),
            " / ".join(format_bytes(max(rank["held_bytes"] for rank in item["by_rank"])) for item in both),
        ]
        table.add_row(named(row), *cells)
    show(table)
    show("measured / simulated. bubble: idle time of the total; held: bytes saved for backward, on the fullest rank")
    for name, why in result["left_out"].items():
        print(f"left out: {name}: {why}")
    pairs, wrong = result["order"]["pairs"], result["order"]["wrong"]
    print(f"{pairs - len(wrong)} of {pairs} pairs whose simulated makespans differ by more than {APART - 1:.0%} were "
          "measured in that order")  # fmt: skip
    for quick, slow in wrong:
        print(f"not in order: {quick} should take less time than {slow}")


def _conditions(result: dict[str, Any]) -> str:
    by = {"shared": "shared memory"}.get(result["transport"], result["transport"])
    size = format_bytes(result["message_bytes"])
    return f"messages of {size} over {by}, in the simulation {format_time(result['hop_s'])} each ({result['hop']})"


def _ratio(row: Row) -> str:
    return "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
