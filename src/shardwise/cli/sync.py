"""Workers of a run or of a layout, and the servers, outer steps or all-reduces in which they agree.

LAYOUT is a layout such as dp=4,sync=ssp,staleness=2. What a run has recorded: docs/servers.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.actions import actions
from shardwise.cli.output import print_result
from shardwise.layout import Layout
from shardwise.report.run_directory import RunDirectory

if TYPE_CHECKING:
    from shardwise.schedule.update_record import UpdateRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = actions(parser)
    shown = action("show", "who read which weights and who waited for whom in a run", show_run)
    shown.add_argument("run_directory", metavar="RUN", type=Path, help="a run directory")
    simulated = action("simulate", "the workers of a layout in virtual time, with slow ranks", simulate)
    simulated.add_argument("layout", metavar="LAYOUT", help="such as dp=4,sync=ssp,staleness=2")
    simulated.add_argument("--steps", type=int, default=24, metavar="N", help="of the run (24)")
    simulated.add_argument(
        "--gradient", default="100ms", metavar="TIME", help="of one gradient, exchange included (100ms)"
    )
    simulated.add_argument("--slow", action="append", default=[], metavar="TEXT", help="a slow rank: "
                           "rank=1,factor=3[,probability=P], or rank=all,spread=0.3; once for each")  # fmt: skip
    simulated.add_argument("--seed", type=int, default=0, metavar="N", help="of slow steps (0)")


def simulate(args: argparse.Namespace) -> int:
    """Print the record of a layout's workers in virtual time."""
    from shardwise.cli.show.sync_table import sync_tables
    from shardwise.layout.virtual_run import virtual_run
    from shardwise.schedule.pipeline.times import seconds_of
    from shardwise.schedule.stragglers import Stragglers

    layout = Layout.parse(args.layout)
    stragglers = Stragglers.parse(args.slow, args.seed)
    record = virtual_run(layout, args.steps, seconds_of(args.gradient), stragglers)
    about = {"layout": str(layout), "steps": args.steps, "slow": str(stragglers), "seed": args.seed}
    data = {**about, "seconds": record.seconds, "servers": [_json(record)]}
    lines = [f"{layout or 'one rank'}, {args.steps} steps in virtual time; slow: {stragglers}"]
    return print_result(args, data, [*lines, *sync_tables(layout, [record])])


def show_run(args: argparse.Namespace) -> int:
    """Print what a run has recorded of its workers."""
    from shardwise.cli.show.sync_table import sync_tables
    from shardwise.layout.recorded_run import recorded_run

    recorded = recorded_run(RunDirectory.open(args.run_directory))
    data: dict[str, Any] = {"run": str(args.run_directory), "layout": str(recorded.layout)}
    data |= {"servers": [_json(record) for record in recorded.records]}
    data |= {
        "rounds": [one._asdict() for one in recorded.rounds],
        "traffic": [one._asdict() for one in recorded.traffic],
    }
    return print_result(args, data, sync_tables(recorded.layout, recorded.records, recorded))


def _json(record: UpdateRecord) -> dict[str, Any]:
    """Counts, and every listed gradient and update."""
    gradients = [{**one._asdict(), "staleness": one.staleness} for one in record.gradients]
    return {**record.summary(), "gradients_listed": gradients, "updated_s": record.updated}
