"""`ClusterJob`: what runs, and where. `JobOptions`: how the cluster runs it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from shardwise.errors import UserError
from shardwise.options import check_fields, option

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
"""Names of jobs: Kubernetes makes host names of them."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


@dataclass(frozen=True)
class JobOptions:
    """Options of a job, whatever runs it."""

    name: str = option("shardwise", "name of the job: lower-case letters, digits and hyphens", metavar="NAME")
    restarts: int = option(
        3, "starts after a rank has failed, from the newest good checkpoint, at most N times", metavar="N", least=0
    )
    signal: int = option(
        120, "seconds before the end of its time in which the job saves and stops", metavar="S", least=1, most=65535
    )
    time: str | None = option(None, "SLURM: time limit, such as 2-00:00:00", metavar="TIME")
    requeue: bool = option(False, "SLURM: continue in a new job after a save at the time limit")
    sbatch: tuple[str, ...] = option(
        (), "SLURM: further option of sbatch, such as --partition=gpu; repeatable", metavar="OPTION", shown=""
    )
    port: int | None = option(
        None, "port at which ranks meet on the first host", metavar="N", least=1, most=65535,
        shown="29500; SLURM: by the job's number",
    )  # fmt: skip
    head: str | None = option(
        None, "address of the first host, where its name does not resolve on the others", metavar="ADDRESS"
    )
    interface: str | None = option(None, "network interface of gloo and NCCL", metavar="NAME")
    env: tuple[str, ...] = option((), "variable of every rank; repeatable", metavar="NAME=VALUE", shown="")
    setup: tuple[str, ...] = option((), "shell line before the ranks start; repeatable", metavar="LINE", shown="")
    container: str | None = option(
        None, "image: Kubernetes needs one; SLURM and ssh run it by apptainer", metavar="IMAGE"
    )
    volume: str | None = option(
        None, "Kubernetes: claim of the shared storage and its path, such as data:/data", metavar="CLAIM:PATH"
    )
    logs: str = option("logs", "folder of each rank's output", metavar="DIR")
    python: str | None = option(None, "Python of the ranks", metavar="FILE", shown="this one; python3 in containers")

    def __post_init__(self) -> None:
        check_fields(self)
        if not NAME.fullmatch(self.name):
            raise UserError(f"--name {self.name!r}: give lower-case letters, digits and hyphens, 52 at most")
        for item in self.env:
            if not VARIABLE.fullmatch(item):
                raise UserError(f"--env {item!r}: give NAME=VALUE")
        for flag, value in (("head", self.head), ("interface", self.interface), ("logs", self.logs)):
            if value is not None and not re.fullmatch(r"[\w./:@%+-]+", value):
                raise UserError(f"--{flag} {value!r}: give a name without blanks and quotes")
        lines = [*self.env, *self.setup, *self.sbatch, self.time or "", self.container or "", self.python or ""]
        if any("\n" in line or "\r" in line for line in lines):
            raise UserError("options of a job are single lines: give --setup once per line")


@dataclass(frozen=True)
class ClusterJob:
    """A training on nodes with as many ranks each."""

    title: str
    """Model and layout, for a comment."""
    words: tuple[str, ...]
    """Arguments of `shardwise`, from "train" on."""
    out: str
    """The run directory, on storage that all nodes share."""
    nodes: int
    ranks: int
    """Ranks per node."""
    gpus: bool
    """Whether each rank has a GPU."""
    folder: str
    """Working directory of the ranks."""
    python: str
    options: JobOptions
    hosts: tuple[str, ...] = ()
    """ssh: one per node, the first one first."""

    @property
    def command(self) -> str:
        """Shell words of a rank."""
        return shlex.join([self.python, "-m", "shardwise", *self.words])

    @property
    def container(self) -> str:
        """Shell words in front of a command that run it in the image, and a blank; empty without an image."""
        if not self.options.container:
            return ""
        gpu = ["--nv"] if self.gpus else []
        return shlex.join(["apptainer", "exec", *gpu, "--bind", self.folder, self.options.container]) + " "

    def variables(self) -> dict[str, str]:
        """Variables of every rank that do not depend on its host."""
        given = dict(item.split("=", 1) for item in self.options.env)
        interface = self.options.interface
        network = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
        return {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **network, **given}

    def shared(self) -> str:
        """A line on the storage that all nodes need."""
        return f"{PurePosixPath(self.out)} is on storage that all nodes share"


@dataclass(frozen=True)
class JobFile:
    """A written job."""

    system: str
    file: str
    """Usual name of the file."""
    text: str
    submit: tuple[str, ...]
    """Command that starts it, before the file; empty where --submit does not exist."""
    start: str
    """The command that a user types, after the file is written."""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {"system": self.system, "file": self.file, "text": self.text, "start": self.start}
