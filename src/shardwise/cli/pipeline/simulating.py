"""`shardwise pipeline simulate`: a schedule in time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.output import print_json, show
from shardwise.cli.pipeline import arguments
from shardwise.cli.show.pipeline_table import step_json
from shardwise.errors import UserError
from shardwise.report.table import plain_table
from shardwise.report.trace import write_trace
from shardwise.report.units import format_share, format_time

if TYPE_CHECKING:
    from shardwise.schedule.pipeline.memory import Peak
    from shardwise.schedule.pipeline.simulate import Simulated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_schedule(parser)
    arguments.add_times(parser)
    arguments.add_stages(parser)
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the timelines as a step report")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write them for ui.perfetto.dev")


def run(args: argparse.Namespace) -> int:
    from shardwise.schedule.pipeline.memory import MicroBatchMemory, peaks
    from shardwise.schedule.pipeline.simulate import simulate
    from shardwise.schedule.pipeline.timeline import report

    timing, schedule = arguments.timing_of(args), arguments.schedule_of(args)
    arguments.check(schedule)
    shares = arguments.shares_of(args, schedule)
    kept = 1.0 if args.recompute is None else args.recompute
    if not (0 <= kept <= 1 and 0 <= args.weight_share <= 1):
        raise UserError("--recompute and --weight-share are parts: 0 to 1")
    held = MicroBatchMemory.shared(schedule, kept, args.weight_share, 1 - kept, shares)
    simulated = simulate(schedule, timing(schedule))
    held_most = peaks(schedule, held)
    if args.report:
        report(simulated).write(args.report)
    if args.trace:
        write_trace(report(simulated), args.trace)
    if args.json:
        about = {"schedule": schedule.name} | {name: getattr(schedule, name) for name in ("ranks", "micro", "virtual")}
        print_json(about | step_json(simulated, peak=[peak._asdict() for peak in held_most]))
    else:
        _print_simulated(simulated, held_most)
    return 0


def _print_simulated(simulated: Simulated, held: list[Peak]) -> None:
    print(arguments.title(simulated.schedule))
    bubbles = f"{format_share(simulated.bubble)} over ideal, {format_share(simulated.bubble_of_total)} of the total"
    print(f"makespan {format_time(simulated.makespan)}; bubble {bubbles}\n")
    headings = ("rank", "busy", "idle", "own span", "idle in it", "F not I", "I not W", "both", "held", "receives")
    table = plain_table((), headings)
    rows = zip(simulated.busy, simulated.idle, simulated.own_span, simulated.own_idle, held, strict=True)
    for rank, (*times, peak) in enumerate(rows):
        counts = (str(peak.forward), str(peak.weight), str(peak.both), f"{peak.held:.3g}", str(peak.buffers))
        table.add_row(str(rank), *map(format_time, times), *counts)
    show(table)
    show("F not I, I not W, both: stage's micro-batches held at most, by what they wait for; held: in a rank's share")
