"""Pipeline schedules: draw them, prove them right, simulate their time and memory, run them.

SCHEDULE is a name such as 1f1b; `shardwise list schedules` shows all of them. --ranks is the number of pipeline
ranks, --micro that of micro-batches, --virtual that of chunks of the model on each rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.declare import arg, word
from shardwise.cli.output import print_json, print_result, progress, show
from shardwise.cli.pipeline import arguments, running
from shardwise.cli.pipeline.arguments import IN_FILE, ScheduleOptions, StageOptions, TimeOptions, VariantOptions
from shardwise.cli.quantities import numbers
from shardwise.cli.show.pipeline_table import named, step_json, totals
from shardwise.codec import keyed
from shardwise.errors import UserError, os_errors
from shardwise.records import dataclass
from shardwise.report.table import plain_table
from shardwise.report.trace import write_trace
from shardwise.report.units import format_share, format_things, format_time
from shardwise.schedule import pipeline
from shardwise.schedule.pipeline.memory import MicroBatchMemory, Peak, peaks
from shardwise.schedule.pipeline.verify import verify

if TYPE_CHECKING:
    from shardwise.schedule.pipeline import PipelineSchedule, ScheduleGenerator
    from shardwise.schedule.pipeline.closed_forms import LeastMicroBatches
    from shardwise.schedule.pipeline.simulate import Simulated

FIELDS = ("name", "micro", "ranks", "stages", "placement", "train", "gather", "reduce", "tied", "ring", "options")
"""Attributes of a schedule that --json shows."""


@dataclass
class ShowSchedule(ScheduleOptions):
    """What each rank does, drawn over time and as lists; or written to a file."""

    out: Path | None = arg("write the lists: torch's form for .csv, else our text", "FILE")
    compute_only: bool = arg("with a .csv file: torch's compute_only format")

    def run(self) -> int:
        from shardwise.schedule.pipeline.show import grid, to_csv, to_text

        schedule = arguments.schedule_of(self)
        if self.compute_only and (not self.out or self.out.suffix != ".csv"):
            raise UserError("--compute-only is a form of CSV: give --out FILE.csv")
        if self.out:
            form = "compute_only" if self.compute_only else "compute_comms"
            text = to_csv(schedule, form) if self.out.suffix == ".csv" else to_text(schedule)  # type: ignore[arg-type]
            with os_errors(f"write {self.out}"):
                self.out.write_text(text)
        if self.json:
            actions = [[str(action) for action in actions] for actions in schedule.actions]
            print_json({name: getattr(schedule, name) for name in FIELDS} | {"actions": actions})
            return 0
        print(arguments.title(schedule))
        if wrong := verify(schedule):
            print(f"\nthis schedule is wrong, see verify: {wrong[0]}")
        elif lines := list(grid(schedule)):
            print("\ntime, where F, I and W of a stage take one unit each:", *lines, sep="\n")
        print("\nactions:", *to_text(schedule).splitlines()[1:], sep="\n")
        return 0


@dataclass
class VerifySchedule(VariantOptions):
    """Prove schedules right; the exit code is 1 where one is wrong."""

    schedule: str | None = word("", "SCHEDULE")
    all: bool = arg("every schedule")
    file: Path | None = arg(
        "a schedule written by show, or by torch (.csv)", excludes="ranks micro virtual early", idle=IN_FILE
    )
    ranks: str = arg("such as 8 or 2,4", "N,...", "1-16")
    micro: str = arg("such as 8 or 2,4", "N,...", "1-64")
    virtual: str = arg("such as 8 or 2,4", "N,...", "1-4")

    def run(self) -> int:
        results: list[dict[str, Any]] = []
        for name, schedules in _to_verify(self):
            results.append(_verified(name, schedules))
            if not self.json:
                _print_verified(results[-1])
        right, total = sum(not result["findings"] for result in results), sum(result["checked"] for result in results)
        print_result(self, results, [f"{right} of {len(results)} are right; {total:,} schedules verified"])
        return 0 if right == len(results) else 1


def _to_verify(args: VerifySchedule) -> Iterator[tuple[str, Iterator[tuple[str, PipelineSchedule]]]]:
    """(name, its schedules with their numbers in words)."""
    if (args.schedule is not None) + args.all + (args.file is not None) != 1:
        raise UserError("verify needs one of SCHEDULE, --all and --file")
    if args.file:
        schedule = arguments.read(args)
        yield str(args.file), iter([(f"{schedule.ranks} ranks", schedule)])
        return
    values = [numbers(f"--{name}", getattr(args, name)) for name in ("ranks", "micro", "virtual")]
    for known in pipeline.generators() if args.all else [pipeline.find(args.schedule or "")]:
        yield known.name, _legal(known, values, args)


def _legal(
    known: ScheduleGenerator, numbers: list[list[int]], args: VerifySchedule
) -> Iterator[tuple[str, PipelineSchedule]]:
    ranks, micro, virtual = numbers
    cases = [(p, m, v) for p in ranks for v in virtual for m in micro]
    legal = [case for case in cases if not known.objection(*case)]
    if not legal and not args.all:
        # Where nothing that was asked for is legal, its message says what would be.
        legal = cases[:1]
    for p, m, v in legal:
        arguments.sized(p, m, v)
    for p, m, v in legal:
        schedule = pipeline.build(known.name, p, m, v, zero=args.zero, tied=args.tied, early=args.early)
        yield f"p={p}, m={m}, v={v}", schedule


def _verified(name: str, schedules: Iterator[tuple[str, PipelineSchedule]]) -> dict[str, Any]:
    """The findings of one generator's schedules; on a terminal, with a line that says how far it is."""
    findings, checked = [], 0
    for case, schedule in schedules:
        progress(f"{name}: {case}")
        checked += 1
        findings += [
            {"case": case, **keyed(finding, "rank index"), "action": str(finding.action), "text": str(finding)}
            for finding in verify(schedule)
        ]
    progress()
    return {"schedule": name, "checked": checked, "findings": findings}


def _print_verified(result: dict[str, Any]) -> None:
    name, checked = result["schedule"], result["checked"]
    if not result["findings"]:
        print(
            f"✓ {name}: right, {format_things(checked, 'case')}" if checked else f"- {name}: no case is legal",
            flush=True,
        )
    for finding in result["findings"]:
        print(f"✗ {name}, {finding['case']}: {finding['text']}", flush=True)


@dataclass
class SimulateSchedule(StageOptions, TimeOptions, ScheduleOptions):
    """A schedule in time: makespan, bubbles, what each rank holds, its timeline."""

    report: Path | None = arg("write the timelines as a step report", "FILE")
    trace: Path | None = arg("write them for ui.perfetto.dev", "FILE")

    def run(self) -> int:
        from shardwise.schedule.pipeline.simulate import simulate
        from shardwise.schedule.pipeline.timeline import report

        timing, schedule = arguments.timing_of(self), arguments.schedule_of(self)
        arguments.check(schedule)
        shares = arguments.shares_of(self, schedule)
        kept = 1.0 if self.recompute is None else self.recompute
        held = MicroBatchMemory.shared(schedule, kept, self.weight_share, 1 - kept, shares)
        simulated = simulate(schedule, timing(schedule))
        held_most = peaks(schedule, held)
        if self.report:
            report(simulated).write(self.report)
        if self.trace:
            write_trace(report(simulated), self.trace)
        if self.json:
            about = {"schedule": schedule.name} | {
                name: getattr(schedule, name) for name in ("ranks", "micro", "virtual")
            }
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


@dataclass
class PlotBubbles(TimeOptions):
    """Bubbles against the number of micro-batches, and the least number for a wanted bubble."""

    schedules: tuple[str, ...] = word("left out, all of training but naive", "SCHEDULE", ())
    ranks: int = arg("stages of the pipeline, one a rank", "P", positive=True)
    micro: str = arg("such as 4,8,16 or 4-64", "M,...", "4,8,16,32,64")
    virtual: int | None = arg("left out, what each schedule needs at least", "V", positive=True)
    want: str | None = arg("a bubble of the total time, such as 5%%", "SHARE")

    def run(self) -> int:
        from shardwise.schedule.pipeline.closed_forms import curve, least_micro

        target, timing = None if self.want is None else _share(self.want), arguments.timing_of(self)
        micro = numbers("--micro", self.micro)
        results: list[dict[str, Any]] = []
        answers: list[str] = []
        for generator, virtual in _compared(self):
            points = curve(generator.name, self.ranks, virtual, micro, timing)
            entry: dict[str, Any] = {"schedule": generator.name, "virtual": virtual, "points": points}
            if target is not None:
                least = least_micro(generator.name, self.ranks, virtual, target, timing)
                entry |= {"least_micro": least.micro, "tried_up_to": min(least.tried, least.most)}
                answers.append(f"{named(entry)}: {str(self.want).strip()} of the total {_answer(least)}")
            results.append(entry)
        if self.json:
            print_json(
                [entry | {"points": [{"micro": m} | totals(s) for m, s in entry["points"]]} for entry in results]
            )
            return 0
        _print_bubbles(self.ranks, micro, results, target)
        print(*answers, sep="\n", end="\n" if answers else "")
        return 0


def _answer(least: LeastMicroBatches) -> str:
    if least.micro is None:
        return f"is not reached with up to {least.most:,} micro-batches"
    if least.tried >= least.micro:
        return f"takes at least {format_things(least.micro, 'micro-batch')}"
    return (
        f"is reached with {format_things(least.micro, 'micro-batch')}; of fewer, not all above {least.tried} were "
        "tried: bubbles go up and down"
    )


def _compared(args: PlotBubbles) -> list[tuple[ScheduleGenerator, int]]:
    """The schedules to compare, each with its chunks a rank."""
    arguments.sized(args.ranks, max(numbers("--micro", args.micro)), 1 if args.virtual is None else args.virtual)
    named = [pipeline.find(name) for name in args.schedules]
    p = args.ranks
    others = [
        g for g in pipeline.generators() if g.train and g.name != "naive" and not g.objection(p, 4 * p, g.virtual)
    ]
    results = []
    for g in named or others:
        virtual = args.virtual if args.virtual is not None else g.virtual
        # Many micro-batches suit every schedule: what fails then fails for p or v.
        if not named and g.objection(p, 4 * p, virtual):
            virtual = g.virtual
        if legal := g.objection(p, 4 * p, virtual):
            raise UserError(f"{g.name} cannot have p={p}, v={virtual}: {legal}")
        results.append((g, virtual))
    return results


def _print_bubbles(ranks: int, micro: list[int], rows: list[dict[str, Any]], wanted: float | None) -> None:
    from shardwise.schedule.pipeline.show import plot

    print(f"bubble on {format_things(ranks, 'rank')}, over ideal / of the total time, against micro-batches")
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


ACTIONS = {
    "show": ShowSchedule,
    "verify": VerifySchedule,
    "simulate": SimulateSchedule,
    "bubble": PlotBubbles,
    "run": (running.RunScheduleOptions, running.run),
}
