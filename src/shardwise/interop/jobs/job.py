"""`ClusterJob`: what runs, and where. `JobOptions`: how the cluster runs it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import PurePosixPath

from shardwise.codec import Json
from shardwise.errors import UserError
from shardwise.interop.jobs.quoting import COMMAND, joined, quoted
from shardwise.options import check_fields, option


@dataclass(frozen=True)
class NodeAgent:
    """A program and its flags for several nodes."""

    words: tuple[str, ...]
    """First words of its command."""
    flags: str = ""
    """Shell words after them, from the variables above. Without single quotes."""
    restarts: bool = False
    """Whether it restarts failed ranks itself."""


AGENTS = (
    NodeAgent(("torchrun",), restarts=True),
    NodeAgent(("python", "-m", "torch.distributed.run"), restarts=True),
    NodeAgent(
        ("accelerate", "launch"),
        "--num_machines $NNODES --machine_rank $NODE_RANK --num_processes $((NNODES * NPROC_PER_NODE)) "
        '--main_process_ip "$MASTER_ADDR" --main_process_port $MASTER_PORT',
    ),
    NodeAgent(
        ("vllm", "serve"),
        '--nnodes $NNODES --node-rank $NODE_RANK --master-addr "$MASTER_ADDR" --master-port $MASTER_PORT '
        "${HEADLESS+--headless}",
    ),
    NodeAgent(
        ("python", "-m", "sglang.launch_server"),
        '--nnodes $NNODES --node-rank $NODE_RANK --dist-init-addr "$MASTER_ADDR:$MASTER_PORT"',
    ),
)
"""vLLM needs a release with --nnodes; its nodes but the first are --headless (HEADLESS is set there)."""


def agent_of(command: Sequence[str]) -> NodeAgent | None:
    """The agent that a command starts. Its program may be a path, and python3 for python."""
    program = command[0].rpartition("/")[2]
    plain = "python" if program.startswith("python") else program
    words = (plain, *command[1:])
    return next((agent for agent in AGENTS if words[: len(agent.words)] == agent.words), None)


NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
"""Names of jobs: Kubernetes makes host names of them."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.ASCII | re.DOTALL)
TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.ASCII | re.IGNORECASE)
"""Time limits of SLURM."""


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
    per: str | None = option(
        None, "a program of your own runs once per node, or per rank", choices=("node", "rank"), shown="node"
    )
    python: str | None = option(None, "Python of the ranks", metavar="FILE", shown="this one; python3 in containers")

    def __post_init__(self) -> None:
        check_fields(self)
        for item in fields(self):
            held = getattr(self, item.name)
            for text in held if isinstance(held, tuple) else [held]:
                if isinstance(text, str):
                    quoted("code", text, f"--{item.name}")
        if not NAME.fullmatch(self.name):
            raise UserError(f"--name {self.name!r}: give lower-case letters, digits and hyphens, 52 at most")
        for variable in self.env:
            if not VARIABLE.fullmatch(variable):
                raise UserError(f"--env {variable!r}: give NAME=VALUE")
        if self.time is not None and not TIME.fullmatch(self.time):
            raise UserError(f"--time {self.time!r}: give minutes, HH:MM:SS or D-HH:MM:SS, such as 2-00:00:00")
        for flag, value in (("head", self.head), ("interface", self.interface)):
            if value is not None and not re.fullmatch(r"[\w./:@%+-]+", value, re.ASCII):
                raise UserError(f"--{flag} {value!r}: give a name without blanks and quotes")
        for flag in ("head", "interface", "container", "volume", "logs", "python"):
            value = getattr(self, flag)
            if value is not None and (not value.strip() or value.startswith("-")):
                raise UserError(f"--{flag} {value!r}: give a value that is not empty and does not begin with a hyphen")


@dataclass(frozen=True)
class ClusterJob:
    """A program on nodes with as many ranks each: shardwise itself, or one of the user's own."""

    title: str
    """For a comment, such as model and layout."""
    words: tuple[str, ...]
    """Arguments of `shardwise`, from "train" or "serve" on; or the user's own command."""
    nodes: int
    ranks: int
    """Ranks per node."""
    gpus: bool
    """Whether each rank has a GPU."""
    folder: str
    """Working directory of the ranks."""
    python: str
    options: JobOptions
    out: str | None = None
    """The run directory of a training, on storage that all nodes share."""
    hosts: tuple[str, ...] = ()
    """ssh: one per node, the first one first."""
    own: bool = False
    """Whether the command is the user's own."""
    per_node: bool = False
    """Whether the command runs once per node and starts the ranks itself."""

    @property
    def task(self) -> str:
        """What runs as one task of SLURM, for the names of logs."""
        return "node" if self.per_node else "rank"

    @property
    def _agent(self) -> NodeAgent | None:
        return agent_of(self.words) if self.per_node else None

    @property
    def restarts_itself(self) -> bool:
        """Whether torchrun restarts failed ranks, where SLURM does not start them."""
        return self._agent is not None and self._agent.restarts if self.per_node else not self.serves

    @property
    def serves(self) -> bool:
        """Whether the command is `serve`."""
        return not self.own and self.words[0] == "serve"

    @property
    def flags(self) -> str:
        """Shell words that tell a program that reads no variables of the other nodes; empty where it needs none."""
        agent = self._agent
        if agent is None or self.nodes == 1:
            return ""
        names = [word for word in agent.flags.split() if word.startswith("--")]
        return "" if any(word.split("=")[0] in names for word in self.words) else agent.flags

    @property
    def program_words(self) -> int:
        """Words of the command before those flags, with the container's."""
        return len(self._container) + (len(self._agent.words) if self._agent else 0)

    @property
    def command(self) -> str:
        """Shell words of a task."""
        return joined(self.words if self.own else (self.python, "-m", "shardwise", *self.words), COMMAND)

    @property
    def command_with_flags(self) -> str:
        """Shell words of a node, with the flags for several nodes."""
        if not self.flags or self._agent is None:
            return self.command
        count = len(self._agent.words)
        return f"{joined(self.words[:count], COMMAND)} {self.flags} {joined(self.words[count:], COMMAND)}"

    @property
    def rank_words(self) -> str:
        """Words behind those of torchrun, which starts the ranks."""
        return ("--no-python " if self.own else "-m shardwise ") + joined(self.words, COMMAND)

    @property
    def _container(self) -> tuple[str, ...]:
        if not self.options.container:
            return ()
        if {",", ":"} & {*self.folder}:
            raise UserError(f"apptainer reads commas and colons of a folder as its own: leave {self.folder!r}")
        gpu = ["--nv"] if self.gpus else []
        return ("apptainer", "exec", *gpu, "--bind", self.folder, self.options.container)

    @property
    def container(self) -> str:
        """Shell words in front of a command that run it in the image, and a blank; empty without an image."""
        return joined(self._container, "--container") + " " if self._container else ""

    def environment(self) -> dict[str, str]:
        """Variables of --env."""
        return dict(item.split("=", 1) for item in self.options.env)

    def variables(self) -> dict[str, str]:
        """Variables of every rank that do not depend on its host."""
        interface = self.options.interface
        network = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
        threads = {} if self.per_node else {"OMP_NUM_THREADS": "1"}
        # Seconds that ranks of torchrun get to save after a signal.
        patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{self.options.signal}"}
        return {"PYTHONUNBUFFERED": "1", **threads, **patience, **network, **self.environment()}

    def shared(self) -> str:
        """A line on the storage that all nodes need."""
        what = "what the command reads and writes" if self.out is None else f"{PurePosixPath(self.out)}"
        return f"{what} is on storage that all nodes share"


@dataclass(frozen=True)
class JobFile(Json):
    """A written job."""

    json_keys = "system file text start"

    system: str
    file: str
    """Usual name of the file."""
    text: str
    submit: tuple[str, ...]
    """Command that starts it, before the file; empty where --submit does not exist."""
    start: str
    """The command that a user types, after the file is written."""
