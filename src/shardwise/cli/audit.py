"""What the ranks of a job of any engine send and hold, what they should, and which rank differs where.

A program after -- is run. It needs no change: a recorder is started in every Python process. When ranks wait for one
another, the program is ended, and the first rank, call and line that differ are named. The exit code is the program's,
else 1 when ranks differ, or when what --expect and --budget ask for does not hold.

FILES are what --out has written, or other software: Flight Recorder dumps (nccl_trace_rank_0, ...; pickle or JSON),
Kineto traces of torch.profiler (.json, .json.gz), execution traces of torch's ExecutionTraceObserver, Chakra graphs
(.et), or folders of them. Nothing in a file is run. Of these, the ranks that came last to collectives, bytes by axis
and where a step's time went are shown, too, beside a prediction's parts with --plan.

shardwise audit -- torchrun --nproc-per-node 4 train.py
"""

from __future__ import annotations

import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.audit.job import AuditedJob, check_command, read_job, run_audited
from shardwise.audit.reading import RECORDINGS
from shardwise.cli.declare import CommandOptions, arg, word
from shardwise.cli.output import print_result
from shardwise.cli.quantities import bytes_of, length_of
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.records import dataclass
from shardwise.report import StepReport
from shardwise.report.run_directory import RunDirectory, occupied
from shardwise.runtime.job.locks import temporary_folder
from shardwise.runtime.job.output import say
from shardwise.runtime.job.signals import handled

if TYPE_CHECKING:
    from shardwise.audit.advice import AdviceRequest
    from shardwise.model import ModelConfig

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BUDGETS = ("memory", "bytes")


@dataclass
class AuditOptions(CommandOptions):
    hang: float = arg("seconds without a call of any rank after which ranks that wait are compared", "SECONDS", 5.0,
                      positive=True)  # fmt: skip
    expect: str | None = arg("layout that the program must have, such as dp=2,tp=2,zero=3,precision=fp32", "LAYOUT")
    budget: str | None = arg("most of a rank: memory=8GB (all classes), bytes=1GB (sent per step)", "NAME=SIZE,...")
    out: Path | None = arg("keep the recording in this folder, a run for shardwise studio --runs", "FOLDER")
    plan: Path | None = arg("compare files with this prediction (shardwise estimate --json > FILE)", "FILE")
    model: str | None = arg(
        "name or config.json of its model, for advice, and for what is due where none is seen", "MODEL"
    )
    cluster: str | None = arg("devices, for advice: what plan would do", "NAME", needs="seq batch")
    seq: int | None = arg("tokens per sequence, for advice", "N", read=lambda option, text: length_of(text),
                          needs="cluster")  # fmt: skip
    batch: int | None = arg("sequences per step, for advice", "N", positive=True, needs="cluster")
    files: tuple[Path, ...] = word("files or folders, in place of a program", "FILES", ())
    program = ()
    """The words of a command behind `--`."""


def run(args: AuditOptions) -> int:
    from shardwise.audit.result import audit_lines, audit_of, failures_of

    if bool(args.program) == bool(args.files):
        raise UserError("name files, or a program: shardwise audit -- torchrun --nproc-per-node 2 train.py")
    if args.files and not (len(args.files) == 1 and any(args.files[0].glob(RECORDINGS))):
        return _files(args)
    expect, most = Layout.parse(args.expect) if args.expect else None, _budget(args.budget)
    model = None
    if args.model:
        from shardwise.model.catalog import resolve

        model = resolve(args.model)
    request = _advice_request(args, model)
    job = _read(args.files[0]) if args.files else _recorded(args)
    audit = audit_of(job, shlex.join(args.program), expect, model)
    audit = replace(audit, failures=failures_of(audit, expect, most))
    if request is not None:
        from shardwise.audit.advice import advice

        audit = replace(audit, advice=tuple(advice(request, job.recordings, audit.understood.layout)))
    if args.out and args.program:
        from shardwise.audit.kept import keep_run

        keep_run(audit, job.recordings, args.out)
    print_result(args, audit.to_json, audit_lines(audit))
    return audit.exit_code


def _files(args: AuditOptions) -> int:
    from shardwise.audit.files.result import audit_files

    if given := [name for name in ("expect", "budget", "out", "cluster") if getattr(args, name) is not None]:
        raise UserError(f"--{given[0]} is for programs and what --out has written: leave it out")
    if not args.files[0].exists() and len(args.files) > 1:
        raise UserError(
            f"{args.files[0]} is no file; a program comes behind --: shardwise audit -- {args.files[0]} ..."
        )
    result = audit_files(args.files, None if args.plan is None else StepReport.read(args.plan))
    print_result(args, result.to_json, result.tables())
    return 1 if result.desync and result.desync.kind != "unfinished" else 0


def _recorded(args: AuditOptions) -> AuditedJob:
    """Run the program; lines that it prints go to standard error with --json."""
    received: list[int] = []
    with temporary_folder() as temporary:
        folder = args.out or temporary
        check_command(args.program)
        if args.out and args.out.is_dir() and occupied(args.out):
            raise UserError(f"--out {args.out} is not empty: give a new folder, or remove it")
        if args.out:
            RunDirectory.create(folder, {"config": {}, "ranks": None, "status": "running"}).close()
        with handled(_SIGNALS, lambda number, frame: received.append(number)):
            return run_audited(list(args.program), folder, args.hang, received, say, stdout=2 if args.json else None)


def _read(folder: Path) -> AuditedJob:
    job = read_job(folder)
    if not job.recordings:
        raise UserError(f"{folder} has no recording of shardwise audit --out")
    return job


def _budget(text: str | None) -> dict[str, int]:
    """Name -> bytes. Raises `UserError`."""
    most = {}
    for item in (text or "").split(",") if text else ():
        name, _, size = item.partition("=")
        if name.strip() not in _BUDGETS:
            raise UserError(f"--budget {item}: give memory=SIZE or bytes=SIZE, such as memory=8GB,bytes=1GB")
        most[name.strip()] = bytes_of("--budget", size)
    return most


def _advice_request(args: AuditOptions, model: ModelConfig | None) -> AdviceRequest | None:
    """Checked before the program runs: a wrong name must not cost its recording."""
    if args.cluster is None:
        return None
    from shardwise.audit.advice import AdviceRequest
    from shardwise.predict.arguments import as_cluster

    assert args.seq and args.batch
    return AdviceRequest(as_cluster(args.cluster), args.seq, args.batch, model)
