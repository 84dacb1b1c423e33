"""What a distributed job did, from files that other software recorded.

FILES are Flight Recorder dumps (nccl_trace_rank_0, ...; pickle or JSON), Kineto traces of torch.profiler (.json,
.json.gz), execution traces of torch's ExecutionTraceObserver, Chakra graphs (.et), or folders of them. Nothing in a
file is run. The exit code is 1 when ranks made different calls.

Shown are the first call at which ranks differ, with its line; the ranks that came last to collectives; bytes by axis;
and where a step's time went, in parts that add up to it. With --plan, a prediction's parts stand next to them.
"""

from __future__ import annotations

from pathlib import Path

from shardwise.cli.declare import CommandOptions, arg, word
from shardwise.cli.output import print_result
from shardwise.records import dataclass


@dataclass
class AuditOptions(CommandOptions):
    """Options of `audit` for files."""

    files: tuple[Path, ...] = word("files or folders", "FILES")
    plan: Path | None = arg("compare with this prediction (shardwise estimate --json > FILE)", "FILE")


def run(args: AuditOptions) -> int:
    from shardwise.audit.files.result import audit_files
    from shardwise.report import StepReport

    result = audit_files(args.files, None if args.plan is None else StepReport.read(args.plan))
    print_result(args, result.to_json, result.tables())
    return 1 if result.desync and result.desync.kind != "unfinished" else 0
