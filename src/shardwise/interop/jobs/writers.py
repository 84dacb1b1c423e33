"""Fill the templates of jobs: SLURM, ssh and Kubernetes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.jobs.job import ClusterJob, JobFile

_TEMPLATES = Path(__file__).with_name("templates")
_PORT = 29500
"""torchrun's usual port."""
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def write_job(system: str, job: ClusterJob) -> JobFile:
    """The job's file for one of `SYSTEMS`. Raises `UserError` for options that the system lacks or needs."""
    return SYSTEMS[system](job)


def _filled(name: str, values: Mapping[str, object]) -> str:
    """A template with every {{place}} replaced. On a line of its own, a value may have several lines, or none."""
    lines = []
    for line in (_TEMPLATES / name).read_text(encoding="utf-8").splitlines():
        alone = _PLACE.fullmatch(line.strip())
        if alone:
            indent = line[: len(line) - len(line.lstrip())]
            lines += [indent + item for item in str(values[alone[1]]).splitlines()]
        else:
            lines.append(_PLACE.sub(lambda match: str(values[match[1]]), line))
    return "\n".join(lines) + "\n"


def _script_values(job: ClusterJob) -> dict[str, object]:
    """Places that both scripts have."""
    options = job.options
    return {
        "title": " ".join(job.title.split()),
        "shared": " ".join(job.shared().split()),
        "name": options.name,
        "nodes": job.nodes,
        "ranks": job.ranks,
        "world": job.nodes * job.ranks,
        "restarts": options.restarts,
        "folder": shlex.quote(job.folder),
        "logs": options.logs,
        "out": shlex.quote(job.out),
        "exports": "\n".join(f"export {name}={shlex.quote(value)}" for name, value in job.variables().items()),
        "setup": "\n".join(options.setup),
        "container": job.container,
        "command": job.command,
    }


def _torchrun(job: ClusterJob, run_id: str, head: str, logs: str, start: str = "") -> str:
    """torchrun's line of every node. run_id, logs: words of shell, whose variables are the script's.
    start: words before it."""
    options = job.options
    return " \\\n    ".join([
        f"{start}{shlex.quote(job.python)} -m torch.distributed.run",
        f"--nnodes {job.nodes} --nproc-per-node {job.ranks} --max-restarts {options.restarts}",
        f'--rdzv-backend c10d --rdzv-id "{run_id}" --rdzv-endpoint {head}:{options.port or _PORT}',
        f'--log-dir "{logs}" --redirects 3',
        f"-m shardwise {shlex.join(job.words)}",
    ])  # fmt: skip


def _slurm(job: ClusterJob) -> JobFile:
    options = job.options
    if options.volume:
        raise UserError("--volume is of Kubernetes: a SLURM job sees the nodes' file systems")
    if any(not item.startswith("-") for item in options.sbatch):
        raise UserError(f"--sbatch {options.sbatch[0]!r}: give an option of sbatch, such as --sbatch=--partition=gpu")
    directives = [f"--gpus-per-node={job.ranks}"] if job.gpus else []
    directives += [f"--time={options.time}"] if options.time else []
    head = options.head or '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    values = _script_values(job) | {
        "directives": "\n".join(f"#SBATCH {item}" for item in [*directives, *options.sbatch]),
        "signal": options.signal,
        "head": head,
        # Jobs that share a node need ports of their own, below those that the system gives to connections.
        "port": options.port or "$((10000 + (SLURM_JOB_ID * 8 + TORCHELASTIC_RESTART_COUNT) % 5000))",
        "requeue": "yes" if options.requeue else "",
    }
    file = f"{options.name}.sbatch"
    return JobFile("slurm", file, _filled("slurm.sh", values), ("sbatch",), "sbatch {file}")


def _ssh(job: ClusterJob) -> JobFile:
    options = job.options
    _reject(options.volume, "--volume is of Kubernetes: a job over ssh sees the hosts' file systems")
    _reject(options.time or options.requeue or options.sbatch, "--time, --requeue and --sbatch are of SLURM")
    for host in job.hosts:
        if not re.fullmatch(r"[\w.@:-]+", host) or host.startswith("-"):
            raise UserError(f"--ssh: {host!r} is no host")
    head = options.head or job.hosts[0].rpartition("@")[2]
    launcher = _torchrun(job, "$job", head, f"{options.logs}/$job-$node", job.container)
    values = _script_values(job) | {"hosts": " ".join(job.hosts), "signal": options.signal, "launcher": launcher}
    return JobFile("ssh", f"{options.name}.sh", _filled("ssh.sh", values), ("bash",), "bash {file}")


def _k8s(job: ClusterJob) -> JobFile:
    options = job.options
    _reject(options.time or options.requeue or options.sbatch, "--time, --requeue and --sbatch are of SLURM")
    if not options.container:
        raise UserError("Kubernetes needs an image: add --container IMAGE")
    claim, _, path = (options.volume or "").partition(":")
    if not claim or not path.startswith("/"):
        raise UserError("Kubernetes needs shared storage for checkpoints: add --volume CLAIM:/PATH")
    if not PurePosixPath(job.out).is_relative_to(path):
        raise UserError(f"--out {job.out} is not on the shared storage: give a folder under {path}")
    filled = json.loads((_TEMPLATES / "kubernetes.json").read_text(encoding="utf-8"))
    values = _script_values(job) | {"claim": claim, "path": path, "image": options.container, "signal": options.signal}
    head = options.head or f"{options.name}-0.{options.name}"
    values |= {"launcher": _torchrun(job, options.name, head, f"{options.logs}/$JOB_COMPLETION_INDEX")}
    objects = _replaced(filled, values)
    container = objects["items"][1]["spec"]["template"]["spec"]["containers"][0]
    wait = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{options.signal}"}
    container["env"] = [{"name": name, "value": value} for name, value in {**wait, **job.variables()}.items()]
    container["args"] = [_filled("kubernetes.sh", values)]
    if not job.gpus:
        del container["resources"]
    text = json.dumps(objects, indent=2) + "\n"
    return JobFile("k8s", f"{options.name}.json", text, (), "kubectl apply -f {file}")


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
