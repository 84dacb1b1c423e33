"""Write a training, a server or a program of your own as a cluster's job: for SLURM, for Kubernetes, or over ssh.

Everything after `--` is the command: `train ...` or `serve ...` as shardwise takes them, or a program such as torchrun,
bash or vllm, which runs once per node with the other nodes in its environment. A training that does not fit the
cluster's devices is an error. --submit starts the job on SLURM or over ssh.
"""

import shlex
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Any

from shardwise import predict
from shardwise.cli import train
from shardwise.cli.clusters import HostOptions, cluster_of
from shardwise.cli.commands import COMMANDS
from shardwise.cli.declare import arg, borrow, given, read, word
from shardwise.cli.models import model_of
from shardwise.cli.output import print_json
from shardwise.cli.plan_file import apply_plan
from shardwise.cluster import Cluster
from shardwise.errors import UserError, did_you_mean, os_errors
from shardwise.interop.jobs import ClusterJob, JobFile, JobOptions, write_job
from shardwise.interop.jobs.quoting import comment
from shardwise.interop.writing.request import nodes_for
from shardwise.lab.job import is_shardwise
from shardwise.layout import Layout, Workload, check_runnable
from shardwise.model import ModelConfig
from shardwise.predict.memory.capacity import capacity_of
from shardwise.records import dataclass
from shardwise.report.units import format_bytes

TRAIN, SERVE = "train", "serve"


@dataclass
class LaunchOptions(HostOptions):
    borrowed = borrow(
        (JobOptions, "name restarts signal time requeue sbatch port head interface env setup container volume logs"),
        (JobOptions, "python per"),
    )
    slurm: bool = arg("a script for sbatch", excludes="k8s ssh")
    k8s: bool = arg("objects for kubectl apply", excludes="ssh")
    ssh: str | None = arg("a script that starts the ranks on these hosts", "HOST,...")
    out: str | None = arg("write the job here (NAME.sbatch, NAME.json or NAME.sh)", "FILE")
    submit: bool = arg("start the job, too: sbatch, or the script for ssh")
    command: tuple[str, ...] = word("train, serve, or a program", "-- COMMAND ...", (), nargs="...")

    @property
    def system(self) -> str:
        """The kind of job. Raises `UserError`."""
        for name in ("slurm", "k8s", "ssh"):
            if getattr(self, name) not in (False, None):
                return name
        raise UserError("launch needs one of --slurm, --k8s and --ssh HOST,...")


def run(args: LaunchOptions) -> int:
    words = _shardwise_words(list(args.command[args.command[:1] == ("--",) :]))
    options, cluster = JobOptions(**given(args, JobOptions)), cluster_of(args)
    described = _described(words, cluster)
    own = words[0] not in (TRAIN, SERVE)
    if options.per and not own:
        raise UserError("--per is for a program of your own: shardwise starts one rank per device itself")
    hosts = tuple(filter(None, args.ssh.split(","))) if args.ssh is not None else ()
    if args.ssh is not None and len(hosts) != described.nodes:
        raise UserError(f"--ssh names {len(hosts)} hosts, and {described.what} fills {described.nodes} of {cluster}")
    python = options.python or ("python3" if args.system == "k8s" or options.container else sys.executable)
    job = ClusterJob(
        f"{comment(described.title)} on {described.nodes} x {described.ranks} {cluster.device.name}", described.words,
        described.nodes, described.ranks, cluster.device.kind == "cuda", str(Path.cwd()),
        python, options, described.out, hosts, own, own and options.per != "rank",
    )  # fmt: skip
    file = write_job(args.system, job)
    return show_job(args, job, file)


def _shardwise_words(words: list[str]) -> list[str]:
    """A command of shardwise without its program, any other as it is."""
    if not words or not is_shardwise(words):
        return words
    return words[1 if Path(words[0]).name == "shardwise" else 3 :]


@dataclass(frozen=True)
class _Described:
    words: tuple[str, ...]
    title: str
    what: str
    """What fills the nodes, for errors."""
    nodes: int
    ranks: int
    """Ranks per node."""
    out: str | None = None
    """The run directory of a training."""


def _described(words: list[str], cluster: Cluster) -> _Described:
    """The command behind `--`. Raises `UserError` for one that cannot be started."""
    if words[:1] == [TRAIN]:
        training = _training(words)
        model, layout = _checked(training, cluster)
        nodes, ranks = nodes_for(layout, cluster)
        title = f"{model.name}, layout {layout}"
        return _Described(_on_devices(words, training, cluster), title, f"{layout}", nodes, ranks, training.out)
    if words[:1] == [SERVE]:
        server, _ = read(SERVE, words[1:])
        layout = Layout.parse(server.layout)
        nodes, ranks = nodes_for(layout, cluster)
        return _Described(_on_devices(words, server, cluster), f"server, layout {layout}", f"{layout}", nodes, ranks)
    if not words or not words[0] or words[0].startswith("-") or words[0] in COMMANDS:
        raise UserError(
            "name the command: shardwise launch ... -- train MODEL --layout ... --out DIR, -- serve FOLDER ..., or a "
            "program such as -- torchrun train.py"
        )
    hint = did_you_mean(words[0], (TRAIN, SERVE), "", cutoff=0.8)
    if hint.startswith("did you mean") and which(words[0]) is None:
        raise UserError(f"no program {words[0]!r} is here; {hint} Give the path of another program")
    nodes, ranks = cluster.nodes, cluster.devices_per_node
    if nodes > 1 and "--standalone" in words:
        raise UserError(f"--standalone trains on each of the {nodes} nodes alone: leave it out")
    return _Described(tuple(words), words[0], words[0], nodes, ranks)


def _on_devices(words: list[str], parsed: Any, cluster: Cluster) -> tuple[str, ...]:
    """A command's words, and the cluster's kind of device where they name none."""
    device = ["--device", "cuda"] if cluster.device.kind == "cuda" and parsed.device is None else []
    return (words[0], *device, *words[1:])


def _training(words: list[str]) -> train.TrainOptions:
    """The arguments of `train`. Raises `UserError`."""
    if any(item.partition("=")[0] == "--resume" for item in words):
        raise UserError("a job resumes its own run by itself: give it the run's first arguments, without --resume")
    parsed, _ = read(TRAIN, words[1:])
    apply_plan(parsed, here=False)
    missing = [f"--{name}" for name in ("data", "seq", "batch", "layout", "out") if getattr(parsed, name) is None]
    if parsed.model is None or missing:
        raise UserError(f"the training needs {', '.join(missing if parsed.model else ['MODEL', *missing])}")
    if parsed.restarts or parsed.port:
        raise UserError("--restarts and --port are the job's: give them before the --")
    return parsed


def _checked(training: train.TrainOptions, cluster: Cluster) -> tuple[ModelConfig, Layout]:
    """The training's model and layout. Raises `UserError` for what does not run, or does not fit."""
    model, layout = model_of(training), Layout.parse(training.layout)
    if training.vocab is not None:
        model = model.replace(vocab=training.vocab)
    workload = Workload(**given(training, Workload))
    check_runnable(layout, model, workload)
    room = capacity_of(cluster)
    peak = max(role.peak_bytes for role in predict.estimate(model, layout, workload, cluster).roles)
    if room is not None and peak > room:
        named = training.model if isinstance(training.model, str) else model.name
        raise UserError(
            f"{model.name} under {layout} needs {format_bytes(peak)} per device, and {cluster.device.name} has "
            f"{format_bytes(room)}: `shardwise plan {shlex.quote(named)} --cluster {cluster} --seq "
            f"{training.seq} --batch {training.batch}` finds layouts that fit"
        )
    return model, layout


def show_job(args: Any, job: ClusterJob, file: JobFile) -> int:
    """Write the job's file, and start it with --submit. Returns the exit code of the command that starts it. Raises
    `UserError` where the file cannot be written, or the job not started."""
    path = Path(args.out or file.file)
    name = f"./{path}" if str(path).startswith("-") else str(path)
    start = file.start.format(file=shlex.quote(name))
    if args.submit and not file.submit:
        raise UserError(f"--submit starts SLURM's jobs and those over ssh: start this one with {start}")
    with os_errors(f"write {path}"):
        path.write_text(file.text, encoding="utf-8")
        Path(job.options.logs).mkdir(parents=True, exist_ok=True)
    code, said = _submitted([*file.submit, name], args.json) if args.submit else (0, "")
    data: dict[str, Any] = file.to_json() | {"out": str(path), "start": start, "submitted": args.submit, "said": said}
    if args.json:
        print_json(data | {"nodes": job.nodes, "ranks": job.nodes * job.ranks, "code": code})
        return code
    print(f"{path}: {job.title}")
    output = (
        "kubectl logs prints the output"
        if file.system == "k8s" and job.per_node
        else f"the output is in {job.options.logs}"
    )
    print(f"  {job.shared()}; {output}")
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
