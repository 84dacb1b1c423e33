"""`shardwise pipeline show`: what each rank does."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.cli.output import print_json
from shardwise.cli.pipeline.arguments import add_schedule, schedule_of, title
from shardwise.errors import UserError, os_errors

FIELDS = ("name", "micro", "ranks", "stages", "placement", "train", "gather", "reduce", "tied", "ring", "options")
"""Attributes of a schedule that --json shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_schedule(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the lists: torch's form for .csv, else our text"
    )
    parser.add_argument("--compute-only", action="store_true", help="with a .csv file: torch's compute_only format")


def run(args: argparse.Namespace) -> int:
    from shardwise.schedule.pipeline.show import grid, to_csv, to_text
    from shardwise.schedule.pipeline.verify import verify

    schedule = schedule_of(args)
    if args.compute_only and (not args.out or args.out.suffix != ".csv"):
        raise UserError("--compute-only is a form of CSV: give --out FILE.csv")
    if args.out:
        form = "compute_only" if args.compute_only else "compute_comms"
        text = to_csv(schedule, form) if args.out.suffix == ".csv" else to_text(schedule)  # type: ignore[arg-type]
        with os_errors(f"write {args.out}"):
            args.out.write_text(text)
    if args.json:
        actions = [[str(action) for action in actions] for actions in schedule.actions]
        print_json({name: getattr(schedule, name) for name in FIELDS} | {"actions": actions})
        return 0
    print(title(schedule))
    if wrong := verify(schedule):
        print(f"\nthis schedule is wrong, see verify: {wrong[0]}")
    elif lines := list(grid(schedule)):
        print("\ntime, where F, I and W of a stage take one unit each:", *lines, sep="\n")
    print("\nactions:", *to_text(schedule).splitlines()[1:], sep="\n")
    return 0
