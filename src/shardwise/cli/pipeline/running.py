"""`shardwise pipeline run`: schedules on processes of this host, a timed wait in place of arithmetic."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.declare import HIDDEN, arg
from shardwise.cli.output import print_json
from shardwise.cli.pipeline.arguments import ScheduleOptions, check, schedule_of, title
from shardwise.cli.quantities import bytes_of
from shardwise.cli.show import pipeline_table
from shardwise.errors import UserError
from shardwise.records import dataclass
from shardwise.report.trace import write_trace
from shardwise.report.units import format_bytes, format_things, format_time
from shardwise.runtime import TRANSPORTS
from shardwise.runtime.installed import require
from shardwise.schedule import pipeline
from shardwise.schedule.pipeline.memory import peaks
from shardwise.schedule.pipeline.times import parse_times, seconds_of

if TYPE_CHECKING:
    from shardwise.emulate.job import EmulationCase
    from shardwise.schedule.pipeline import PipelineSchedule

MOST_RANKS = 64
_LONG = 10.0
"""Seconds from which on a run says beforehand how long it takes."""


@dataclass
class RunScheduleOptions(ScheduleOptions):
    """Run schedules on processes of this host, with a timed wait in place of arithmetic."""

    all: bool = arg(
        "instead: every schedule that is legal for these numbers", excludes="schedule file warmup tokens trace"
    )
    emulate: str | None = arg(
        "what a rank waits for one micro-batch, all its chunks: F=20ms,I=20ms,W=20ms or F=20ms,B=40ms", "F=,I=,W="
    )
    steps: int = arg("steps to measure", "N", 3, positive=True)
    bytes: int = arg("of one message", "SIZE", "1MB", read=bytes_of)
    saved: int | None = arg(
        "what a rank, all its chunks, saves of one micro-batch for backward (as much as a message)",
        "SIZE",
        read=bytes_of,
    )
    weight_share: float = arg("part of what F saves that W needs", "X", 1.0, least=0, most=1)
    hop: str = arg(
        "latency of a message in the simulation; auto: that between neighbours, measured first", "TIME", "auto"
    )
    transport: str = arg(
        "what carries messages: shared memory, or gloo; auto prefers the first", default="auto", choices=TRANSPORTS
    )
    trace: Path | None = arg("write the measured timelines for ui.perfetto.dev", "FILE")
    layout: str | None = arg(HIDDEN)  # only to say where layouts are run


def run(args: RunScheduleOptions) -> int:
    from shardwise.emulate.job import measure

    if args.emulate is None or args.layout is not None:
        model = f"shardwise train MODEL --layout {args.layout or 'pp=4,schedule=1f1b'}"
        raise UserError(f"run replaces arithmetic by waits: give --emulate F=20ms,I=20ms,W=20ms; a model: {model}")
    require("running schedules", "torch")
    hop = None if args.hop == "auto" else seconds_of(args.hop)
    cases, left_out = _cases(args)
    _feasible(args, cases)
    measured = measure(cases, _nbytes(args), args.steps, args.transport)
    result = pipeline_table.summed_up(measured, measured.hop if hop is None else hop)
    about = {"message_bytes": _nbytes(args), "hop": "measured" if hop is None else "given", "left_out": left_out}
    if args.trace:
        from shardwise.schedule.pipeline.timeline import report

        notes = ("a measured schedule, its arithmetic emulated: timelines only, no bytes and no ledger",)
        write_trace(replace(report(measured.cases[0].median), source="measured", notes=notes), args.trace)
    if args.json:
        print_json(about | result)
    elif args.all:
        pipeline_table.print_all(about | result)
    else:
        pipeline_table.print_one(about | result, title(cases[0].schedule))
    return 0


def _nbytes(args: RunScheduleOptions) -> int:
    """Bytes of a message, in whole words."""
    from shardwise.emulate.job import WORD

    return max(1, -(-args.bytes // WORD)) * WORD


def _cases(args: RunScheduleOptions) -> tuple[list[EmulationCase], dict[str, str]]:
    """What is to be run; and with --all the schedules that these numbers are not for: name -> why."""
    from shardwise.emulate.job import EmulationCase

    params = parse_times(args.emulate or "")
    saved = _nbytes(args) if args.saved is None else args.saved
    left_out: dict[str, str] = {}
    schedules = _every(args, left_out) if args.all else [schedule_of(args)]
    for schedule in schedules:
        check(schedule)
    times = (params["F"], params["I"], params["W"])
    return [EmulationCase.shared(schedule, *times, saved, args.weight_share) for schedule in schedules], left_out


def _every(args: RunScheduleOptions, left_out: dict[str, str]) -> list[PipelineSchedule]:
    """Every schedule that is legal, with --virtual chunks a rank where it can have that many."""
    if args.ranks is None or args.micro is None:
        raise UserError("run --all needs --ranks and --micro")
    results = []
    for g in pipeline.generators():
        target = g.virtual if args.virtual is None else args.virtual
        virtual = g.virtual if g.objection(args.ranks, args.micro, target) else target
        if why := g.objection(args.ranks, args.micro, virtual):
            left_out[g.name] = why
        else:
            numbers = args.ranks, args.micro, virtual
            results.append(pipeline.build(g.name, *numbers, zero=args.zero, tied=args.tied, early=args.early))
    return results


def _feasible(args: RunScheduleOptions, cases: list[EmulationCase]) -> None:
    """Refuse what this host cannot do, and say how long it takes where that is long."""
    from shardwise.schedule.pipeline.simulate import simulate

    ranks = cases[0].schedule.ranks
    if ranks > MOST_RANKS:
        raise UserError(f"--ranks {ranks}: at most {MOST_RANKS} are run on one host")
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for case in cases:
        most = sum(peak.held + 2 * peak.buffers * _nbytes(args) for peak in peaks(case.schedule, case.held))
        if most > 0.8 * here:
            raise UserError(
                f"{case.schedule.name} would hold {format_bytes(most)} on a host of {format_bytes(here)}: "
                "give smaller --saved or --bytes"
            )
    seconds = args.steps * sum(simulate(case.schedule, case.times).makespan for case in cases)
    if seconds > _LONG:
        what = f"{format_things(len(cases), 'schedule')}, {format_things(args.steps, 'step')} each"
        print(f"{what}: about {format_time(seconds)}", file=sys.stderr, flush=True)
