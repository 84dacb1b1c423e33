"""A run's prediction against its measurement, or two step reports: every row of the ledger, every class of bytes.

A and B are report files, or run directories, which stand for their measured report. A run directory alone is compared
with itself: what was predicted for it with what was measured. The exit code is 1 when the ledgers differ. A verdict on
the step that a run has recorded comes first. Of a run with parameter servers follow its updates, their staleness, and
the messages of the whole run.

Two predictions (`estimate --json > a.json`) need not be equal: they are shown side by side, with exit code 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.declare import CommandOptions, word
from shardwise.cli.output import print_json, print_result, show
from shardwise.errors import UserError, near_path
from shardwise.records import dataclass
from shardwise.report import StepReport, compare
from shardwise.report.predictions import are_predictions, prediction_tables, predictions_json
from shardwise.report.run_directory import RunDirectory
from shardwise.report.tables import comparison_tables
from shardwise.report.verdict import verdict_of

if TYPE_CHECKING:
    from shardwise.layout.recorded_run import RecordedRun


@dataclass
class CompareOptions(CommandOptions):
    a: Path = word("a report file, or a run directory", "A")
    b: Path | None = word("another one; left out if A is a run directory", "B")


def run(args: CompareOptions) -> int:
    if args.b is None:
        if args.a.is_file():
            raise UserError(f"{args.a} is one report; name the report or run directory to compare it with")
        a, b = _of_run(args.a, "predicted"), _of_run(args.a, "measured")
    else:
        a, b = _report(args.a), _report(args.b)
    if are_predictions(a, b):
        return print_result(args, predictions_json(a, b), prediction_tables(a, b))
    outcome = compare(a, b)
    served = {str(path): run for path in (args.a, args.b) if path is not None and (run := _served(path))}
    runs = [path for path in (args.a, args.b) if path is not None and (path / "run.json").is_file()]
    verdicts_of = ((str(path), verdict_of(RunDirectory.open(path))) for path in runs)
    # An audit's recording has no computing, so nothing says what hides its calls.
    judged = {path: one for path, one in verdicts_of if one and any(rank.computing for rank in one.parts.ranks)}
    if args.json:
        updates = [{"run": path, **run.to_json()} for path, run in served.items()]
        verdicts = [{"run": path, **verdict.to_json()} for path, verdict in judged.items()]
        more = {"verdicts": verdicts, "updates": updates}
        print_json(outcome.to_json() | {name: rows for name, rows in more.items() if rows})
    else:
        lines = [verdict.text(path if len(judged) > 1 else "") + "\n" for path, verdict in judged.items()]
        notes = () if args.b or _trained(args.a) else (f"note: {note}" for note in a.notes)
        show(*lines, comparison_tables(outcome), *notes)
        for path, run in served.items():
            from shardwise.cli.show.sync_table import sync_tables

            show(f"\n{path}", *sync_tables(run.layout, run.records, run))
    return 0 if outcome.equal_ledger else 1


def _trained(path: Path) -> bool:
    """Whether a run directory is of `train`, and not of an audit."""
    return not (path / "run.json").is_file() or "corpus" in RunDirectory.open(path).run.get("config", {})


def _served(path: Path) -> RecordedRun | None:
    """The record of a run directory with parameter servers."""
    if not (path / "updates.jsonl").is_file():
        return None
    from shardwise.layout.recorded_run import recorded_run

    return recorded_run(RunDirectory.open(path))


def _report(path: Path) -> StepReport:
    return _of_run(path, "measured") if path.is_dir() else StepReport.read(path)


def _of_run(path: Path, name: str) -> StepReport:
    if not path.is_dir():
        raise UserError(f"no such report or run directory: {path}{near_path(path)}")
    file = path / "reports" / f"{name}.json"
    if not file.is_file():
        makes = "; `shardwise train --report` makes one" if _trained(path) else ""
        if name == "predicted" and (path / "reports" / "measured.json").is_file():
            makes = ": its layout has no prediction, as the run has said"
        raise UserError(f"{path} has no {name} report{makes}")
    return StepReport.read(file)
