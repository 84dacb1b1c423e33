"""Fill the templates of jobs: SLURM, ssh and Kubernetes."""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.jobs.job import ClusterJob, JobFile
from shardwise.interop.jobs.quoting import FOLDER, SETUP, comment, instead, quoted

_TEMPLATES = Path(__file__).with_name("templates")
_PORT = 29500
"""torchrun's usual port."""
_POD = "$JOB_COMPLETION_INDEX"
"""Number of a pod."""
_PLACE = re.compile(r"\{\{(\w+)\}\}")
_USED = re.compile(r"\b([A-Za-z_]\w*) ?\+?=(?!=)|\bfor (\w+) in\b|\bread -r (\w+)|\$\{?([A-Za-z_]\w*)")
"""Variables that a script sets or reads."""
_OF_BASH = re.compile(
    "IFS|PS[124]|BASH|BASH_.*|BASHOPTS|SHELLOPTS|ENV|POSIXLY_CORRECT|EXECIGNORE|UID|EUID|PPID|PWD|OLDPWD|SHLVL|_|S?RANDOM|SECONDS|"
    "EPOCH.*|LINENO|FUNCNAME|GROUPS|DIRSTACK|HISTCMD|PIPESTATUS|OPTIND|OPTARG|OPTERR"
)
"""Variables that bash reads as code, changes its ways by, or does not pass on as they are."""
_LONGEST_ARGUMENT = 1 << 17
"""Bytes of an argument, with its end: Linux's MAX_ARG_STRLEN."""


def write_job(system: str, job: ClusterJob) -> JobFile:
    """The job's file for one of `SYSTEMS`. Raises `UserError` for options that the system lacks or needs."""
    return SYSTEMS[system](job)


def _template(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _filled(name: str, values: Mapping[str, object]) -> str:
    """A template with every {{place}} replaced. On a line of its own, a value may have several lines, or none."""
    lines = []
    for line in _template(name).rstrip("\n").split("\n"):
        alone = _PLACE.fullmatch(line.strip())
        if alone:
            indent = line[: len(line) - len(line.lstrip())]
            lines += [indent + item for item in str(values[alone[1]]).split("\n") if item]
        else:
            lines.append(_PLACE.sub(lambda match: str(values[match[1]]), line))
    return "\n".join(lines) + "\n"


def _script_values(job: ClusterJob) -> dict[str, object]:
    """Places that all scripts have."""
    options = job.options
    return {
        "title": comment(job.title),
        "shared": comment(job.shared()),
        "name": options.name,
        "nodes": job.nodes,
        "ranks": job.ranks,
        "restarts": options.restarts,
        "signal": options.signal,
        "logs": quoted("shell", options.logs, "--logs"),
        "exports": "\n".join(
            f"export {name}={quoted('shell', value, '--env')}" for name, value in job.variables().items()
        ),
        "setup": "\n".join(quoted("code", line, SETUP) for line in options.setup),
    }


def _check_variables(job: ClusterJob, *texts: str) -> None:
    """Raise `UserError` for a variable of --env that the job's script, or bash, has for itself.

    Of a variable that a script computes with, bash would run what is in it.
    """
    names = {name for text in texts for groups in _USED.findall(text) for name in groups if name}
    for name in job.environment():
        if name in names:
            raise UserError(f"--env {name}=...: the job sets {name} itself; leave it out, or give it another name")
        if _OF_BASH.fullmatch(name):
            raise UserError(f"--env {name}=...: bash has {name} for itself; set it in your program, or by --setup")


def _node_variables(job: ClusterJob, *more: str) -> str:
    """Lines that name the nodes of a program that runs once per node. more: of the system."""
    headless = ["((NODE_RANK == 0)) || export HEADLESS=yes"] if job.nodes > 1 and "HEADLESS" in job.flags else []
    return "\n".join([
        f"export NNODES={job.nodes} NPROC_PER_NODE={job.ranks} {more[0]}",
        "export PET_NNODES=$NNODES PET_NPROC_PER_NODE=$NPROC_PER_NODE PET_NODE_RANK=$NODE_RANK",
        *more[1:],
        *headless,
    ])  # fmt: skip


def _slurm(job: ClusterJob) -> JobFile:
    options = job.options
    if options.volume:
        raise UserError("--volume is of Kubernetes: a SLURM job sees the nodes' file systems")
    logs = options.logs
    for what, path in ((FOLDER, job.folder), ("--logs", logs)):
        if {"%", "\\"} & {*path}:
            raise UserError(
                f"{what} {path!r}: SLURM reads % and backslashes in paths of logs as its own; {instead(what)}"
            )
    directives = [f"--gpus-per-node={job.ranks}"] if job.gpus else []
    if options.time:
        directives.append(f"--time={options.time}")
    directives += [_sbatch_option(item) for item in options.sbatch]
    head = quoted("shell", options.head, "--head") if options.head else _FIRST_NODE
    number = "%n" if job.per_node else "%t"
    place = _slurm_place(job)
    values = _script_values(job) | {
        "starter": "srun starts it, one task per node" if job.per_node else "srun starts the ranks, one task each",
        "tasks": 1 if job.per_node else job.ranks,
        "directives": "\n".join(f"#SBATCH {item}" for item in directives),
        "chdir": quoted("sbatch", job.folder, FOLDER),
        "job_log": quoted("sbatch", logs, "--logs") + "/job-%j.log",
        "head": head,
        # Jobs that share a node need ports of their own, below those that the system gives to connections.
        "port": options.port or "$((10000 + (SLURM_JOB_ID * 8 + TORCHELASTIC_RESTART_COUNT) % 5000))",
        "task_log": quoted("shell", logs, "--logs") + f"/{job.task}-{number}.log",
        "place": place,
        "run": '"$@"' if not job.flags else f'"${{@:1:{job.program_words}}}" {job.flags} '
        f'"${{@:{job.program_words + 1}}}"',
        "task": job.task,
        "command": job.container + job.command,
        "requeue": _requeue(job),
    }  # fmt: skip
    _check_variables(job, _template("slurm.sh"), place)
    file = f"{options.name}.sbatch"
    return JobFile("slurm", file, _filled("slurm.sh", values), ("sbatch",), "sbatch {file}")


_FIRST_NODE = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


def _slurm_place(job: ClusterJob) -> str:
    """Lines of a task that name it to its program."""
    if not job.per_node:
        world = job.nodes * job.ranks
        return (
            "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID\n"
            f"export WORLD_SIZE={world} LOCAL_WORLD_SIZE={job.ranks}"
        )
    return _node_variables(
        job, "NODE_RANK=$SLURM_NODEID", "export PET_MASTER_ADDR=$MASTER_ADDR PET_MASTER_PORT=$MASTER_PORT"
    )


def _sbatch_option(item: str) -> str:
    """An option of sbatch, its value quoted. Raises `UserError` for what is none."""
    option = re.fullmatch(r"(--?[A-Za-z][A-Za-z-]*)([= ]?)(.*)", item, re.DOTALL)
    if not option:
        raise UserError(f"--sbatch {item!r}: give an option of sbatch, such as --sbatch=--partition=gpu")
    name, sign, value = option.groups()
    return name + sign + (quoted("sbatch", value, "--sbatch") if value else "")


def _requeue(job: ClusterJob) -> str:
    """The line that continues in a new job after a save at the time limit; empty without --requeue."""
    if not job.options.requeue:
        return ""
    again = 'scontrol requeue "$SLURM_JOB_ID"'
    if job.out is None:
        return again
    run = quoted("shell", job.out, "--out")
    return f'grep -qs \'"status": "finished"\' -- {run}/run.json || {again}'


def _launcher(job: ClusterJob, run_id: str, node: str, head: str, logs: str) -> tuple[str, str]:
    """(lines of every node that name it, shell words that run there), where SLURM does not start the ranks.

    run_id, node: words of shell, whose variables are the script's. head: the first node's address. logs: its folder of
    logs, in double quotes.
    """
    options = job.options
    address, port = quoted("shell", head, "--head"), options.port or _PORT
    if job.per_node:
        restarts = [f"export PET_MAX_RESTARTS={options.restarts}"] if job.restarts_itself else []
        place = _node_variables(
            job,
            f"NODE_RANK={node} MASTER_ADDR={address} MASTER_PORT={port}",
            f"export PET_RDZV_BACKEND=c10d PET_RDZV_ID={run_id} PET_RDZV_ENDPOINT=$MASTER_ADDR:$MASTER_PORT",
            *restarts,
        )
        return place, job.command_with_flags
    if job.serves:
        # HTTP is on rank 0's host: the first one.
        meeting = [f"--node-rank {node} --master-addr {address} --master-port {port} --max-restarts 0"]
    else:
        meeting = [
            f"--max-restarts {options.restarts}",
            f'--rdzv-backend c10d --rdzv-id "{run_id}" --rdzv-endpoint {address}:{port}',
        ]
    return "", " \\\n    ".join([
        f"{quoted('shell', job.python, '--python')} -m torch.distributed.run",
        f"--nnodes {job.nodes} --nproc-per-node {job.ranks}",
        *meeting,
        f"--log-dir {quoted('shell', options.logs, '--logs')}/\"{logs}\" --redirects 3",
        job.rank_words,
    ])  # fmt: skip


def _ssh(job: ClusterJob) -> JobFile:
    options = job.options
    _reject(options.volume, "--volume is of Kubernetes: a job over ssh sees the hosts' file systems")
    _reject(options.time or options.requeue or options.sbatch, "--time, --requeue and --sbatch are of SLURM")
    for host in job.hosts:
        if not re.fullmatch(r"([\w.-]+@)?[\w:][\w.:-]*", host, re.ASCII) or host.startswith("-"):
            raise UserError(f"--ssh: {host!r} is no host")
    place, launcher = _launcher(job, "$job", "$node", options.head or job.hosts[0].rpartition("@")[2], "$job-$node")
    values = _script_values(job) | {
        "starter": "ssh starts it on each host" if job.per_node else "torchrun starts the ranks of each host",
        "folder": quoted("shell", job.folder, FOLDER),
        "hosts": " ".join(quoted("shell", host, "--ssh") for host in job.hosts),
        "place": place,
        "launcher": job.container + launcher,
        "attempts": 0 if job.restarts_itself else options.restarts,
    }
    values |= {part: shlex.quote(_filled(f"ssh_{part}.sh", values)) for part in ("start", "stop")}
    _check_variables(job, _template("ssh.sh"), _template("ssh_start.sh"), place, "node=")
    return JobFile("ssh", f"{options.name}.sh", _filled("ssh.sh", values), ("bash",), "bash {file}")


def _k8s(job: ClusterJob) -> JobFile:
    options = job.options
    _reject(options.time or options.requeue or options.sbatch, "--time, --requeue and --sbatch are of SLURM")
    if not options.container:
        raise UserError("Kubernetes needs an image: add --container IMAGE")
    claim, path = _volume(job)
    # Names of Services are labels of RFC 1035, which begin with a letter.
    name = options.name if options.name[0].isalpha() else f"job-{options.name[:48].rstrip('-')}"
    place, launcher = _launcher(job, name, _POD, options.head or f"{name}-0.{name}", _POD)
    values = _script_values(job) | {
        "name": name,
        "claim": claim, "path": path, "place": place, "launcher": launcher,
        "image": quoted("json", options.container, "--container"),
    }  # fmt: skip
    objects = _replaced(json.loads(_template("kubernetes.json")), values)
    pod = objects["items"][1]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    variables = job.variables().items()
    container["env"] = [{"name": name, "value": quoted("kubernetes", value, "--env")} for name, value in variables]
    script = _filled("kubernetes.sh", values).replace("$", "$$")
    if len(script.encode()) >= _LONGEST_ARGUMENT:
        raise UserError("the command is too long for a pod (128 KiB): put it into a file, such as a script")
    container["args"] = [script]
    _check_variables(job, _template("kubernetes.sh"), place, _POD)
    if not job.gpus:
        del container["resources"]
    if not claim:
        del container["workingDir"], container["volumeMounts"][0], pod["volumes"][0]
    text = json.dumps(objects, indent=2) + "\n"
    return JobFile("k8s", f"{options.name}.json", text, (), "kubectl apply -f {file}")


def _volume(job: ClusterJob) -> tuple[str, str]:
    """(claim of the shared storage, its path); empty where a program of the user's own needs none."""
    if job.out is None and job.options.volume is None:
        return "", ""
    claim, _, path = quoted("json", job.options.volume or "", "--volume").partition(":")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", claim) or not path.startswith("/") or ":" in path:
        raise UserError("Kubernetes needs shared storage for checkpoints: add --volume CLAIM:/PATH")
    if job.out is not None and not PurePosixPath(job.out).is_relative_to(path):
        raise UserError(f"--out {job.out} is not on the shared storage: give a folder under {path}")
    return claim, path


def _reject(value: Any, line: str) -> None:
    if value:
        raise UserError(line)


def _replaced(node: Any, values: Mapping[str, object]) -> Any:
    """A JSON tree with every place replaced: one that is a text of its own keeps the value's type."""
    if isinstance(node, dict):
        return {key: _replaced(item, values) for key, item in node.items()}
    if isinstance(node, list):
        return [_replaced(item, values) for item in node]
    if not isinstance(node, str):
        return node
    alone = _PLACE.fullmatch(node)
    return values[alone[1]] if alone else _PLACE.sub(lambda match: str(values[match[1]]), node)


SYSTEMS: dict[str, Callable[[ClusterJob], JobFile]] = {"slurm": _slurm, "k8s": _k8s, "ssh": _ssh}
"""Name -> writer."""
