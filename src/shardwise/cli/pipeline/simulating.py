"""`shardwise pipeline simulate`: a schedule in time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.output import print_json, show
from shardwise.cli.pipeline.arguments import (
    add_schedule,
    add_stages,
    add_times,
    check,
    schedule_of,
    shares_of,
    timing_of,
    title,
)
from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.schedule.pipeline.memory import Peak
    from shardwise.schedule.pipeline.simulate import Simulated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_schedule(parser)
    add_times(parser)
    add_stages(parser)
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the timelines as a step report")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write them for ui.perfetto.dev")


def run(args: argparse.Namespace) -> int:
    from shardwise.schedule.pipeline.memory import MicroBatchMemory, peaks
    from shardwise.schedule.pipeline.simulate import simulate

    timing, schedule = timing_of(args), schedule_of(args)
    check(schedule)
    shares = shares_of(args, schedule)
    kept = 1.0 if args.recompute is None else args.recompute
    if not (0 <= kept <= 1 and 0 <= args.weight_share <= 1):
        raise UserError("--recompute and --weight-share are parts: 0 to 1")
    held = MicroBatchMemory.shared(schedule, kept, args.weight_share, 1 - kept, shares)
    simulated = simulate(schedule, timing(schedule))
    held_most = peaks(schedule, held)
    _write_timelines(args, simulated)
    if args.json:
        print_json(_simulated_json(simulated, held_most))
    else:
        _print_simulated(simulated, held_most)
    return 0


def _write_timelines(args: argparse.Namespace, simulated: Simulated) -> None:
    if not args.report and not args.trace:
        return
    from shardwise.report.trace import write_trace
    from shardwise.schedule.pipeline.timeline import report

    result = report(simulated)
    if args.report:
        result.write(args.report)
    if args.trace:
        write_trace(result, args.trace)


def _simulated_json(simulated: Simulated, held: list[Peak]) -> dict[str, Any]:
    schedule = simulated.schedule
    rows = zip(simulated.busy, simulated.idle, simulated.own_span, simulated.own_idle, held, strict=True)
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "micro": schedule.micro,
        "virtual": schedule.virtual,
        "makespan_s": simulated.makespan,
        "bubble_over_ideal": simulated.bubble,
        "bubble_of_total": simulated.bubble_of_total,
        "by_rank": [
            {
                "rank": r,
                "busy_s": busy,
                "idle_s": idle,
                "own_span_s": span,
                "own_idle_s": own_idle,
                "peak": peak._asdict(),
            }
            for r, (busy, idle, span, own_idle, peak) in enumerate(rows)
        ],
    }


def _print_simulated(simulated: Simulated, held: list[Peak]) -> None:
    from rich.table import Table

    from shardwise.report.units import format_share, format_time

    schedule = simulated.schedule
    print(title(schedule))
    bubbles = f"{format_share(simulated.bubble)} over ideal, {format_share(simulated.bubble_of_total)} of the total"
    print(f"makespan {format_time(simulated.makespan)}; bubble {bubbles}\n")
    table = Table(box=None, pad_edge=False)
    headings = ("rank", "busy", "idle", "own span", "idle in it", "F not I", "I not W", "both", "held", "receives")
    for heading in headings:
        table.add_column(heading, justify="right")
    rows = zip(simulated.busy, simulated.idle, simulated.own_span, simulated.own_idle, held, strict=True)
    for rank, (*times, peak) in enumerate(rows):
        counts = (str(peak.forward), str(peak.weight), str(peak.both), f"{peak.held:.3g}", str(peak.buffers))
        table.add_row(str(rank), *map(format_time, times), *counts)
    show(table)
    show("F not I, I not W, both: stage's micro-batches held at most, by what they wait for; held: in a rank's share")
