"""`shardwise pipeline verify`: whether schedules are right."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.output import print_json, progress
from shardwise.cli.pipeline.arguments import add_variants, count, read, sized
from shardwise.cli.quantities import numbers
from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.schedule.pipeline import PipelineSchedule, ScheduleGenerator

NUMBERS = {"ranks": "1-16", "micro": "1-64", "virtual": "1-4"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedule", metavar="SCHEDULE", nargs="?")
    parser.add_argument("--all", action="store_true", help="every schedule")
    parser.add_argument("--file", type=Path, help="a schedule written by show, or by torch (.csv)")
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", metavar="N,...", help=f"such as 8 or 2,4; left out, {default}")
    add_variants(parser)


def run(args: argparse.Namespace) -> int:
    results: list[dict[str, Any]] = []
    for name, schedules in _to_verify(args):
        results.append(_verified(name, schedules))
        if not args.json:
            _print_verified(results[-1])
    wrong = [result for result in results if result["findings"]]
    if args.json:
        print_json(results)
    else:
        total = sum(result["checked"] for result in results)
        print(f"{len(results) - len(wrong)} of {len(results)} are right; {total:,} schedules verified")
    return 1 if wrong else 0


def _to_verify(args: argparse.Namespace) -> Iterator[tuple[str, Iterator[tuple[str, PipelineSchedule]]]]:
    """(name, its schedules with their numbers in words)."""
    from shardwise.schedule.pipeline import find, generators

    if (args.schedule is not None) + args.all + (args.file is not None) != 1:
        raise UserError("verify needs one of SCHEDULE, --all and --file")
    if args.file:
        schedule = read(args, (*NUMBERS, "early"))
        yield str(args.file), iter([(f"{schedule.ranks} ranks", schedule)])
        return
    params = ((name, getattr(args, name), default) for name, default in NUMBERS.items())
    values = [numbers(f"--{name}", default if text is None else text) for name, text, default in params]
    for known in generators() if args.all else [find(args.schedule)]:
        yield known.name, _legal(known, values, args)


def _legal(
    known: ScheduleGenerator, numbers: list[list[int]], args: argparse.Namespace
) -> Iterator[tuple[str, PipelineSchedule]]:
    from shardwise.schedule.pipeline import build

    ranks, micro, virtual = numbers
    cases = [(p, m, v) for p in ranks for v in virtual for m in micro]
    legal = [case for case in cases if not known.objection(*case)]
    if not legal and not args.all:
        # Where nothing that was asked for is legal, its message says what would be.
        legal = cases[:1]
    for p, m, v in legal:
        sized(p, m, v)
    for p, m, v in legal:
        schedule = build(known.name, p, m, v, zero=args.zero, tied=args.tied, early=args.early)
        yield f"p={p}, m={m}, v={v}", schedule


def _verified(name: str, schedules: Iterator[tuple[str, PipelineSchedule]]) -> dict[str, Any]:
    """The findings of one generator's schedules; on a terminal, with a line that says how far it is."""
    from shardwise.schedule.pipeline.verify import verify

    findings, checked = [], 0
    for case, schedule in schedules:
        progress(f"{name}: {case}")
        checked += 1
        findings += [
            {
                "case": case,
                "rank": finding.rank,
                "index": finding.index,
                "action": str(finding.action),
                "text": str(finding),
            }
            for finding in verify(schedule)
        ]
    progress()
    return {"schedule": name, "checked": checked, "findings": findings}


def _print_verified(result: dict[str, Any]) -> None:
    name, checked = result["schedule"], result["checked"]
    if not result["findings"]:
        print(f"✓ {name}: right, {count(checked, 'case')}" if checked else f"- {name}: no case is legal", flush=True)
    for finding in result["findings"]:
        print(f"✗ {name}, {finding['case']}: {finding['text']}", flush=True)
