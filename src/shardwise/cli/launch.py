"""Write a training as a cluster's job: for SLURM, for Kubernetes, or for hosts over ssh.

Everything after `--` is the training, as `shardwise train` takes it. One that does not fit the cluster's devices is an
error. --submit starts the job on SLURM or over ssh.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from shardwise.cli import train
from shardwise.cli.clusters import add_cluster, cluster_of
from shardwise.cli.flags import add_flags, given
from shardwise.cli.models import model_of
from shardwise.cli.output import print_json
from shardwise.cli.plan_file import apply_plan
from shardwise.cli.run_file import parsed as parsed_with_file
from shardwise.cluster import Cluster
from shardwise.errors import UserError, os_errors
from shardwise.interop import WriteRequest
from shardwise.interop.jobs import ClusterJob, JobFile, JobOptions, write_job
from shardwise.interop.writing.commands import nodes_of
from shardwise.layout import Layout, Workload, check_runnable
from shardwise.model import ModelConfig

_OPTIONS = (
    "name", "restarts", "signal", "time", "requeue", "sbatch", "port", "head", "interface", "env", "setup", "container",
    "volume", "logs", "python",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    system = parser.add_mutually_exclusive_group(required=True)
    system.add_argument("--slurm", dest="system", action="store_const", const="slurm", help="a script for sbatch")
    system.add_argument("--k8s", dest="system", action="store_const", const="k8s", help="objects for kubectl apply")
    system.add_argument("--ssh", metavar="HOST,...", help="a script that starts the ranks on these hosts")
    add_cluster(parser, required=True)
    add_flags(parser, JobOptions, *_OPTIONS)
    parser.add_argument("--out", metavar="FILE", help="write the job here (NAME.sbatch, NAME.json or NAME.sh)")
    parser.add_argument("--submit", action="store_true", help="start the job, too: sbatch, or the script for ssh")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- train ...", help="the training")


def run(args: argparse.Namespace) -> int:
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    options, cluster = JobOptions(**given(args, JobOptions)), cluster_of(args)
    training = _training(words)
    model, layout, workload = _checked(training, cluster)
    nodes, ranks = nodes_of(WriteRequest(model, layout, workload, cluster=cluster))
    hosts = tuple(filter(None, args.ssh.split(","))) if args.ssh is not None else ()
    if args.ssh is not None and len(hosts) != nodes:
        raise UserError(f"--ssh names {len(hosts)} hosts, and {layout} fills {nodes} of {cluster}")
    job = ClusterJob(
        f"{model.name}, layout {layout} on {nodes} x {ranks} {cluster.device.name}", tuple(words), training.out, nodes,
        ranks, cluster.device.kind == "cuda", str(Path.cwd()), options.python or _python(args, options), options, hosts,
    )  # fmt: skip
    file = write_job(args.system or "ssh", job)
    return _write(args, job, file)


def _python(args: argparse.Namespace, options: JobOptions) -> str:
    return "python3" if args.system == "k8s" or options.container else sys.executable


def _training(words: list[str]) -> argparse.Namespace:
    """The arguments of `train`. Raises `UserError`."""
    from shardwise.cli.main import Parser

    if words[:1] != ["train"]:
        raise UserError("name the training: shardwise launch ... -- train MODEL --layout ... --out DIR")
    parser = Parser(prog="shardwise train", allow_abbrev=False)
    train.add_arguments(parser)
    parsed = parsed_with_file(parser, words[1:], train.FILE_KEYS)
    apply_plan(parsed, here=False)
    if parsed.resume is not None:
        raise UserError("a job resumes its own run by itself: give it the run's first arguments, without --resume")
    missing = [f"--{name}" for name in ("data", "seq", "batch", "layout", "out") if getattr(parsed, name) is None]
    if parsed.model is None or missing:
        raise UserError(f"the training needs {', '.join(missing if parsed.model else ['MODEL', *missing])}")
    if parsed.restarts or parsed.port:
        raise UserError("--restarts and --port are the job's: give them before the --")
    return parsed


def _checked(training: argparse.Namespace, cluster: Cluster) -> tuple[ModelConfig, Layout, Workload]:
    """The training's model, layout and workload. Raises `UserError` for what does not run, or does not fit."""
    from shardwise.predict import estimate
    from shardwise.predict.memory.capacity import capacity_of
    from shardwise.report.units import format_bytes

    model, layout = model_of(training), Layout.parse(training.layout)
    if training.vocab is not None:
        model = model.replace(vocab=training.vocab)
    if training.seq < 1 or training.batch < 1:
        raise UserError("--seq and --batch must be positive integers")
    workload = Workload(**given(training, Workload))
    check_runnable(layout, model, workload)
    room = capacity_of(cluster)
    peak = max(role.peak_bytes for role in estimate(model, layout, workload, cluster).roles)
    if room is not None and peak > room:
        named = training.model if isinstance(training.model, str) else model.name
        raise UserError(
            f"{model.name} under {layout} needs {format_bytes(peak)} per device, and {cluster.device.name} has "
            f"{format_bytes(room)}: `shardwise plan {shlex.quote(named)} --cluster {cluster} --seq "
            f"{training.seq} --batch {training.batch}` finds layouts that fit"
        )
    return model, layout, workload


def _write(args: argparse.Namespace, job: ClusterJob, file: JobFile) -> int:
    """Write the job's file, and start it with --submit. Returns the exit code of the command that starts it."""
    path = Path(args.out or file.file)
    start = file.start.format(file=shlex.quote(str(path)))
    if args.submit and not file.submit:
        raise UserError(f"--submit starts SLURM's jobs and those over ssh: start this one with {start}")
    with os_errors(f"write {path}"):
        path.write_text(file.text, encoding="utf-8")
        Path(job.options.logs).mkdir(parents=True, exist_ok=True)
    code, said = _submitted([*file.submit, str(path)], args.json) if args.submit else (0, "")
    data: dict[str, Any] = file.to_json() | {"out": str(path), "start": start, "submitted": args.submit, "said": said}
    if args.json:
        print_json(data | {"nodes": job.nodes, "ranks": job.nodes * job.ranks, "code": code})
        return code
    print(f"{path}: {job.title}")
    print(f"  {job.shared()}; each rank's output is in {job.options.logs}")
    print(f"  {said or 'start it with: ' + start}")
    return code


def _submitted(command: list[str], quiet: bool) -> tuple[int, str]:
    """(exit code, what the command printed). A script for ssh runs to its end here."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=None if not quiet else subprocess.DEVNULL, text=True
        )
    except FileNotFoundError:
        raise UserError(f"there is no command {command[0]} here: copy the file to where it is") from None
    if done.returncode and command[0] == "sbatch":
        raise UserError("sbatch rejects the job (see above)")
    return done.returncode, done.stdout.strip()
