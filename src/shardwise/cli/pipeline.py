"""Pipeline schedules as data: which there are, what each rank does, whether it is right, what it takes and holds.

SCHEDULE is a name such as 1f1b; `list` has them all. P ranks, M micro-batches, V chunks of the model a rank.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.actions import actions
from shardwise.cli.output import print_json, show
from shardwise.cli.quantities import bytes_of, numbers
from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.schedule.pipeline import Generator, PipelineSchedule
    from shardwise.schedule.pipeline.memory import Peak
    from shardwise.schedule.pipeline.simulate import Simulated
    from shardwise.schedule.pipeline.times import Times

GENERATOR_OPTIONS = {
    "warmup": "forwards of rank 0 before its first pair (1f1b); left out, P - 1",
    "tokens": "tokens of each micro-batch (decode)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = actions(parser)
    action("list", "all schedules, with the numbers that they are for")
    drawn = action("show", "what each rank does, drawn over time and as lists; or written to a file")
    _add_schedule(drawn)
    drawn.add_argument("--out", type=Path, metavar="FILE", help="write the lists: torch's form for .csv, else our text")
    drawn.add_argument("--compute-only", action="store_true", help="with a .csv file: torch's compute_only format")
    verify = action("verify", "prove schedules right; the exit code is 1 where one is wrong")
    verify.add_argument("schedule", metavar="SCHEDULE", nargs="?")
    verify.add_argument("--all", action="store_true", help="every schedule")
    verify.add_argument("--file", type=Path, help="a schedule written by show, or by torch (.csv)")
    for name, default in (("ranks", "1-16"), ("micro", "1-64"), ("virtual", "1-4")):
        verify.add_argument(f"--{name}", default=default, metavar="N,...", help=f"such as 8, {default} or 2,4")
    verify.add_argument("--zero", type=int, default=0, metavar="Z", help="ZeRO stage: adds gathers and reductions")
    verify.add_argument("--tied", action="store_true", help="the embedding is the head's table, too")
    simulate = action("simulate", "a schedule in time: makespan, bubbles, what each rank holds, its timeline")
    _add_schedule(simulate)
    _add_times(simulate)
    _add_stages(simulate)
    simulate.add_argument("--report", type=Path, metavar="FILE", help="write the timelines as a step report")
    simulate.add_argument("--trace", type=Path, metavar="FILE", help="write them for ui.perfetto.dev")
    bubble = action("bubble", "bubbles against the number of micro-batches, and the least number for a wanted bubble")
    bubble.add_argument("schedules", metavar="SCHEDULE", nargs="*", help="left out, all of training but naive")
    bubble.add_argument("--ranks", type=int, required=True, metavar="P")
    bubble.add_argument("--micro", default="4,8,16,32,64", metavar="M,...", help="such as 4,8,16 or 4-64")
    bubble.add_argument("--virtual", type=int, metavar="V", help="left out, what each schedule needs at least")
    bubble.add_argument("--want", metavar="SHARE", help="a bubble of the total time, such as 5%%")
    _add_times(bubble)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedule", metavar="SCHEDULE", nargs="?")
    parser.add_argument("--file", type=Path, help="instead: a schedule written by show, or by torch (.csv)")
    parser.add_argument("--ranks", type=int, metavar="P")
    parser.add_argument("--micro", type=int, metavar="M")
    parser.add_argument("--virtual", type=int, metavar="V", help="left out, what the schedule needs at least")
    parser.add_argument("--zero", type=int, default=0, metavar="Z", help="ZeRO stage: adds gathers and reductions")
    parser.add_argument("--tied", action="store_true", help="the embedding is the head's table, too")
    for option, text in GENERATOR_OPTIONS.items():
        parser.add_argument(f"--{option}", type=int, metavar="N", help=text)


def _add_times(parser: argparse.ArgumentParser) -> None:
    text = "what a rank takes for one micro-batch, all its chunks: F=20ms,I=20ms,W=20ms or F=20ms,B=40ms"
    parser.add_argument("--times", default="F=1,I=1,W=1", metavar="F=,I=,W=", help=text)
    parser.add_argument("--together", type=float, default=1.0, metavar="X", help="an overlapped F&B takes X (F + B)")
    parser.add_argument("--hop", default="0", metavar="TIME", help="latency of a message between stages")
    parser.add_argument("--bytes", metavar="SIZE", help="of one message, such as 16MB; with --bandwidth")
    parser.add_argument("--bandwidth", metavar="SIZE", help="bytes a second of a link, such as 50GB")
    parser.add_argument("--no-overlap", action="store_true", help="a sender stands still while its message leaves")


def _add_stages(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the model, as evenly as can be")
    parser.add_argument("--stages", metavar="N/N/...", help="layers of each stage: 21/20/20/19")
    parser.add_argument("--head", type=float, default=0.0, metavar="X", help="the head's work, in layers")
    parser.add_argument(
        "--weight-share", type=float, default=1.0, metavar="X", help="part of what F saves that W needs"
    )
    text = "recompute in backward: F keeps the part X of what it saves otherwise, and I does F once more"
    parser.add_argument("--recompute", type=float, metavar="X", help=text)


def run(args: argparse.Namespace) -> int:
    todo = {"list": _list, "show": _show, "verify": _verify, "simulate": _simulate, "bubble": _bubble}
    return todo[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from shardwise.schedule.pipeline import generators
    from shardwise.schedule.pipeline.closed_forms import FORMS

    found = generators()
    if args.json:
        fields = ("name", "summary", "source", "shape", "train", "virtual", "options")
        formulas = ({"bubble": FORMS[g.name].text, "holds": FORMS[g.name].note} for g in found)
        print_json([{name: getattr(g, name) for name in fields} | f for g, f in zip(found, formulas, strict=True)])
        return 0

    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("", "V", "options", "bubble", "what it does", "source"):
        table.add_column(heading)
    for g in found:
        virtual = "1" if g.virtual == 1 else "2" if g.shape == "vee" else "2 or more"
        table.add_row(g.name, virtual, ", ".join(g.options), FORMS[g.name].text, g.summary, g.source)
    notes = [f"{g.name}: {FORMS[g.name].note}" for g in found if FORMS[g.name].note]
    show(table, "\nwhere the bubbles of the table hold, while messages take no time:", *notes)
    return 0


def _show(args: argparse.Namespace) -> int:
    from shardwise.schedule.pipeline.show import grid
    from shardwise.schedule.pipeline.text import to_csv, to_text

    schedule = _schedule(args)
    if args.compute_only and (not args.out or args.out.suffix != ".csv"):
        raise UserError("--compute-only is a form of CSV: give --out FILE.csv")
    if args.out:
        form = "compute_only" if args.compute_only else "compute_comms"
        _write(args.out, to_csv(schedule, form) if args.out.suffix == ".csv" else to_text(schedule))  # type: ignore[arg-type]
    if args.json:
        print_json(_described(schedule))
        return 0
    print(_title(schedule))
    lines = list(grid(schedule))
    if lines:
        print("\ntime, where F, I and W of a stage take one unit each:", *lines, sep="\n")
    print("\nactions:", *to_text(schedule).splitlines()[1:], sep="\n")
    return 0


def _described(schedule: PipelineSchedule) -> dict[str, Any]:
    fields = ("name", "micro", "ranks", "stages", "placement", "train", "gather", "reduce", "tied", "ring", "options")
    return {name: getattr(schedule, name) for name in fields} | {
        "actions": [[str(action) for action in mine] for mine in schedule.actions]
    }


def _title(schedule: PipelineSchedule) -> str:
    chunks = f", {schedule.virtual} chunks a rank" if schedule.virtual > 1 else ""
    total = sum(map(len, schedule.actions))
    size = f"{_count(schedule.ranks, 'rank')}, {_count(schedule.micro, 'micro-batch')}{chunks}"
    return f"{schedule.name}: {size}; {total:,} actions"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}{'es' if what.endswith('ch') else 's'}"


def _schedule(args: argparse.Namespace) -> PipelineSchedule:
    """The schedule of --file, or of a name and numbers."""
    from shardwise.schedule.pipeline import build, find

    if bool(args.schedule) == bool(args.file):
        raise UserError(f"{args.action} needs either SCHEDULE or --file")
    if args.file:
        return _read(args.file, args.zero, args.tied)
    if args.ranks is None or args.micro is None:
        raise UserError(f"{args.action} needs --ranks and --micro")
    found = find(args.schedule)
    options = {name: value for name in GENERATOR_OPTIONS if (value := getattr(args, name)) is not None}
    virtual = found.virtual if args.virtual is None else args.virtual
    return build(found.name, args.ranks, args.micro, virtual, zero=args.zero, tied=args.tied, **options)


def _read(path: Path, zero: int, tied: bool) -> PipelineSchedule:
    from shardwise.schedule.pipeline.text import from_csv, from_text

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read schedule {path}: {getattr(error, 'strerror', None) or 'not text'}") from None
    try:
        return from_csv(text, path.stem, zero=zero, tied=tied) if path.suffix == ".csv" else from_text(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _verify(args: argparse.Namespace) -> int:
    results: list[dict[str, Any]] = []
    for name, schedules in _to_verify(args):
        results.append(_verified(name, schedules))
        if not args.json:
            _print_verified(results[-1])
    wrong = [result for result in results if result["findings"]]
    if args.json:
        print_json(results)
    else:
        count = sum(result["checked"] for result in results)
        print(f"{len(results) - len(wrong)} of {len(results)} are right; {count:,} schedules verified")
    return 1 if wrong else 0


def _to_verify(args: argparse.Namespace) -> Iterator[tuple[str, Iterator[tuple[str, PipelineSchedule]]]]:
    """(name, its schedules with their numbers in words)."""
    from shardwise.schedule.pipeline import find, generators

    if (args.schedule is not None) + args.all + (args.file is not None) != 1:
        raise UserError("verify needs one of SCHEDULE, --all and --file")
    if args.file:
        read = _read(args.file, args.zero, args.tied)
        yield str(args.file), iter([(f"{read.ranks} ranks", read)])
        return
    asked = [numbers(f"--{name}", getattr(args, name)) for name in ("ranks", "micro", "virtual")]
    for found in generators() if args.all else [find(args.schedule)]:
        yield found.name, _legal(found, asked, args)


def _legal(
    found: Generator, numbers: list[list[int]], args: argparse.Namespace
) -> Iterator[tuple[str, PipelineSchedule]]:
    from shardwise.schedule.pipeline import build

    ranks, micro, virtual = numbers
    cases = [(p, m, v) for p in ranks for v in virtual for m in micro]
    legal = [case for case in cases if not found.objection(*case)]
    if not legal and not args.all:
        # Where nothing that was asked for is legal, its message says what would be.
        legal = cases[:1]
    for p, m, v in legal:
        yield f"p={p}, m={m}, v={v}", build(found.name, p, m, v, zero=args.zero, tied=args.tied)


def _verified(name: str, schedules: Iterator[tuple[str, PipelineSchedule]]) -> dict[str, Any]:
    """The findings of one generator's schedules; on a terminal, with a line that says how far it is."""
    from shardwise.schedule.pipeline.verify import verify

    findings, checked = [], 0
    for case, schedule in schedules:
        if sys.stderr.isatty():
            print(f"\r\033[K{name}: {case}", end="", file=sys.stderr, flush=True)
        checked += 1
        findings += [
            {"case": case, "rank": found.rank, "index": found.index, "action": str(found.action), "text": str(found)}
            for found in verify(schedule)
        ]
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return {"schedule": name, "checked": checked, "findings": findings}


def _print_verified(result: dict[str, Any]) -> None:
    name, checked = result["schedule"], result["checked"]
    if not result["findings"]:
        print(f"✓ {name}: right, {_count(checked, 'case')}" if checked else f"- {name}: no case is legal", flush=True)
    for found in result["findings"]:
        print(f"✗ {name}, {found['case']}: {found['text']}", flush=True)


def _timing(args: argparse.Namespace) -> Callable[[PipelineSchedule], Times]:
    """Schedule -> times, from the flags."""
    from shardwise.schedule.pipeline.times import Times, parse_times, seconds_of

    given, alpha = parse_times(args.times), seconds_of(args.hop)
    if (args.bytes is None) != (args.bandwidth is None):
        raise UserError("--bytes and --bandwidth go together: a message takes --hop + bytes / bandwidth")
    nbytes = bytes_of("--bytes", args.bytes) if args.bytes else 0
    bandwidth = bytes_of("--bandwidth", args.bandwidth) if args.bandwidth else 1
    if not bandwidth or not 0 < args.together <= 1:
        raise UserError("--bandwidth must be positive, and --together above 0 and at most 1")
    recompute = getattr(args, "recompute", None) is not None

    def timing(schedule: PipelineSchedule) -> Times:
        again = given["F"] if recompute else 0.0
        times = Times.shared(schedule, given["F"], given["I"] + again, given["W"], _shares(args, schedule))
        times = times.with_hop(alpha, 1 / bandwidth, nbytes, not args.no_overlap)
        return replace(times, together=args.together)

    return timing


def _shares(args: argparse.Namespace, schedule: PipelineSchedule) -> tuple[float, ...]:
    """Each stage's part of the model's work; empty for equal ones."""
    from shardwise.schedule.pipeline.stages import Stages

    if getattr(args, "stages", None):
        stages = Stages.parse(args.stages, schedule.stages, args.layers)
    elif getattr(args, "layers", None):
        stages = Stages.even(args.layers, schedule.stages)
    elif getattr(args, "head", 0):
        raise UserError("--head counts in layers: give --layers or --stages, too")
    else:
        return ()
    if args.head < 0:
        raise UserError(f"--head must not be negative, got {args.head}")
    return stages.shares(head=args.head)


def _simulate(args: argparse.Namespace) -> int:
    from shardwise.schedule.pipeline.memory import Held, peaks
    from shardwise.schedule.pipeline.simulate import simulate

    timing, schedule = _timing(args), _schedule(args)
    _right(schedule)
    shares = _shares(args, schedule)
    kept = 1.0 if args.recompute is None else args.recompute
    if not (0 <= kept <= 1 and 0 <= args.weight_share <= 1):
        raise UserError("--recompute and --weight-share are parts: 0 to 1")
    held = Held.shared(schedule, kept, args.weight_share, 1 - kept, shares)
    simulated = simulate(schedule, timing(schedule))
    held_most = peaks(schedule, held)
    _write_timelines(args, simulated)
    if args.json:
        print_json(_simulated_json(simulated, held_most))
    else:
        _print_simulated(simulated, held_most)
    return 0


def _right(schedule: PipelineSchedule) -> None:
    from shardwise.schedule.pipeline.verify import verify

    if wrong := verify(schedule):
        raise UserError(f"this schedule is wrong: {wrong[0]}")


def _write_timelines(args: argparse.Namespace, simulated: Simulated) -> None:
    if not args.report and not args.trace:
        return
    from shardwise.report.trace import write_trace
    from shardwise.schedule.pipeline.timeline import report

    found = report(simulated)
    if args.report:
        found.write(args.report)
    if args.trace:
        write_trace(found, args.trace)


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
                "own_span_s": own,
                "own_idle_s": own_idle,
                "peak": peak._asdict(),
            }
            for r, (busy, idle, own, own_idle, peak) in enumerate(rows)
        ],
    }


def _print_simulated(simulated: Simulated, held: list[Peak]) -> None:
    from rich.table import Table

    from shardwise.report.units import format_share, format_time

    schedule = simulated.schedule
    print(_title(schedule))
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


def _bubble(args: argparse.Namespace) -> int:
    from shardwise.schedule.pipeline.bubbles import MOST_MICRO, curve, least_micro

    wanted, timing = _share(args.want) if args.want else None, _timing(args)
    micro = numbers("--micro", args.micro)
    found: list[dict[str, Any]] = []
    for generator, virtual in _compared(args):
        points = curve(generator.name, args.ranks, virtual, micro, timing)
        entry: dict[str, Any] = {"schedule": generator.name, "virtual": virtual, "points": points}
        if wanted is not None:
            entry["least_micro"] = least_micro(generator.name, args.ranks, virtual, wanted, timing)
        found.append(entry)
    if args.json:
        print_json([entry | {"points": [_point(m, s) for m, s in entry["points"]]} for entry in found])
        return 0
    _print_bubbles(args.ranks, micro, found, wanted)
    for entry in found if wanted is not None else ():
        least = entry["least_micro"]
        takes = f"takes at least {_count(least, 'micro-batch')}"
        answer = takes if least else f"is not reached with up to {MOST_MICRO:,} micro-batches"
        print(f"{_named(entry)}: {args.want.strip()} of the total {answer}")
    return 0


def _compared(args: argparse.Namespace) -> list[tuple[Generator, int]]:
    """The schedules to compare, each with its chunks a rank."""
    from shardwise.schedule.pipeline import build, find, generators

    if args.ranks < 1:
        raise UserError(f"--ranks must be a positive integer, not {args.ranks}")
    named = [find(name) for name in args.schedules]
    p = args.ranks
    others = [g for g in generators() if g.train and g.name != "naive" and not g.objection(p, 4 * p, g.virtual)]
    found = []
    for g in named or others:
        virtual = args.virtual if args.virtual is not None else g.virtual
        # Many micro-batches suit every schedule: what is refused then is refused for p or v.
        if not named and g.objection(p, 4 * p, virtual):
            virtual = g.virtual
        build(g.name, p, 4 * p, virtual)
        found.append((g, virtual))
    return found


def _named(entry: dict[str, Any]) -> str:
    return entry["schedule"] + (f" v={entry['virtual']}" if entry["virtual"] > 1 else "")


def _point(m: int, simulated: Simulated) -> dict[str, Any]:
    return {
        "micro": m,
        "makespan_s": simulated.makespan,
        "bubble_over_ideal": simulated.bubble,
        "bubble_of_total": simulated.bubble_of_total,
    }


def _print_bubbles(ranks: int, micro: list[int], found: list[dict[str, Any]], wanted: float | None) -> None:
    from rich.table import Table

    from shardwise.report.units import format_share
    from shardwise.schedule.pipeline.show import plot

    print(f"bubble on {_count(ranks, 'rank')}, over ideal / of the total time, against micro-batches")
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    shown = micro if len(micro) <= 10 else micro[:: -(-len(micro) // 10)]
    for m in shown:
        table.add_column(str(m), justify="right")
    for entry in found:
        by_m = dict(entry["points"])
        cells = (
            f"{format_share(by_m[m].bubble)} / {format_share(by_m[m].bubble_of_total)}" if m in by_m else "-"
            for m in shown
        )
        table.add_row(_named(entry), *cells)
    show(table)
    curves = {_named(entry): [(m, s.bubble_of_total) for m, s in entry["points"]] for entry in found}
    print("\nof the total time:")
    for line in plot(curves, wanted=wanted):
        print(line)


def _share(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value < 1:
        raise UserError(f"--want {text}: give a part of the total time, such as 5% or 0.05")
    return value
