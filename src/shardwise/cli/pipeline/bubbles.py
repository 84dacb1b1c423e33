"""`shardwise pipeline bubble`: bubbles against the number of micro-batches."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from shardwise.cli.output import print_json, show
from shardwise.cli.pipeline.arguments import add_times, count, sized, timing_of
from shardwise.cli.quantities import numbers
from shardwise.cli.show.pipeline_table import named, totals
from shardwise.errors import UserError
from shardwise.report.table import plain_table
from shardwise.report.units import format_share

if TYPE_CHECKING:
    from shardwise.schedule.pipeline import ScheduleGenerator
    from shardwise.schedule.pipeline.closed_forms import LeastMicroBatches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedules", metavar="SCHEDULE", nargs="*", help="left out, all of training but naive")
    parser.add_argument("--ranks", type=int, required=True, metavar="P", help="stages of the pipeline, one a rank")
    parser.add_argument("--micro", default="4,8,16,32,64", metavar="M,...", help="such as 4,8,16 or 4-64")
    parser.add_argument("--virtual", type=int, metavar="V", help="left out, what each schedule needs at least")
    parser.add_argument("--want", metavar="SHARE", help="a bubble of the total time, such as 5%%")
    add_times(parser)


def run(args: argparse.Namespace) -> int:
    from shardwise.schedule.pipeline.closed_forms import curve, least_micro

    target, timing = None if args.want is None else _share(args.want), timing_of(args)
    micro = numbers("--micro", args.micro)
    results: list[dict[str, Any]] = []
    answers: list[str] = []
    for generator, virtual in _compared(args):
        points = curve(generator.name, args.ranks, virtual, micro, timing)
        entry: dict[str, Any] = {"schedule": generator.name, "virtual": virtual, "points": points}
        if target is not None:
            least = least_micro(generator.name, args.ranks, virtual, target, timing)
            entry |= {"least_micro": least.micro, "tried_up_to": min(least.tried, least.most)}
            answers.append(f"{named(entry)}: {args.want.strip()} of the total {_answer(least)}")
        results.append(entry)
    if args.json:
        print_json([entry | {"points": [{"micro": m} | totals(s) for m, s in entry["points"]]} for entry in results])
        return 0
    _print_bubbles(args.ranks, micro, results, target)
    print(*answers, sep="\n", end="\n" if answers else "")
    return 0


def _answer(least: LeastMicroBatches) -> str:
    if least.micro is None:
        return f"is not reached with up to {least.most:,} micro-batches"
    if least.tried >= least.micro:
        return f"takes at least {count(least.micro, 'micro-batch')}"
    return (
        f"is reached with {count(least.micro, 'micro-batch')}; of fewer, not all above {least.tried} were tried: "
        "bubbles go up and down"
    )


def _compared(args: argparse.Namespace) -> list[tuple[ScheduleGenerator, int]]:
    """The schedules to compare, each with its chunks a rank."""
    from shardwise.schedule.pipeline import find, generators

    sized(args.ranks, max(numbers("--micro", args.micro)), 1 if args.virtual is None else args.virtual)
    named = [find(name) for name in args.schedules]
    p = args.ranks
    others = [g for g in generators() if g.train and g.name != "naive" and not g.objection(p, 4 * p, g.virtual)]
    results = []
    for g in named or others:
        virtual = args.virtual if args.virtual is not None else g.virtual
        # Many micro-batches suit every schedule: what is refused then is refused for p or v.
        if not named and g.objection(p, 4 * p, virtual):
            virtual = g.virtual
        if legal := g.objection(p, 4 * p, virtual):
            raise UserError(f"{g.name} cannot have p={p}, v={virtual}: {legal}")
        results.append((g, virtual))
    return results


def _print_bubbles(ranks: int, micro: list[int], rows: list[dict[str, Any]], wanted: float | None) -> None:
    from shardwise.schedule.pipeline.show import plot

    print(f"bubble on {count(ranks, 'rank')}, over ideal / of the total time, against micro-batches")
    shown = micro if len(micro) <= 10 else micro[:: -(-len(micro) // 10)]
    table = plain_table([""], map(str, shown))
    for entry in rows:
        by_m = dict(entry["points"])
        cells = (
            f"{format_share(by_m[m].bubble)} / {format_share(by_m[m].bubble_of_total)}" if m in by_m else "-"
            for m in shown
        )
        table.add_row(named(entry), *cells)
    show(table)
    curves = {named(entry): [(m, s.bubble_of_total) for m, s in entry["points"]] for entry in rows}
    print("\nof the total time:")
    for line in plot(curves, wanted=wanted):
        print(line)


def _share(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value < 1:
        raise UserError(f"--want {text}: give a part of the total time, such as 5% or 0.05")
    return value
