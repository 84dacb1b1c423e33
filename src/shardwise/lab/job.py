"""A command on the hosts of a lab: started, watched, passed signals, and ended with whatever it has started.

A shardwise command runs once, outside, and its own launcher starts each rank on its host (`runtime/job/hosts.py`). Any
other command runs once per host, as the agent of a launcher: torchrun finds the number of nodes, its own number and the
first host's address in its environment.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import UserError, os_errors
from shardwise.lab.network import LabNetwork, PortBytes
from shardwise.runtime.job.hosts import PORT, VARIABLE, HostFile, LaunchHost

GRACE = 5.0
"""Seconds that the commands of other hosts get to end by themselves after one has failed, and again after SIGTERM."""
_POLL = 0.02
_PDEATHSIG = 1


@dataclass(frozen=True)
class LabResult:
    """End of a command in the lab."""

    code: int
    seconds: float
    traffic: tuple[PortBytes, ...]
    """Bytes that crossed each host's port."""


def is_shardwise(command: Sequence[str]) -> bool:
    """Whether a command is one of shardwise's own, as `shardwise ...` or `python -m shardwise ...`."""
    program, words = Path(command[0]).name, list(command[1:3])
    return program == "shardwise" or (program.startswith("python") and words == ["-m", "shardwise"])


def run_command(
    command: Sequence[str], network: LabNetwork, folder: Path, received: list[int], *,
    cluster: Path | None = None, stdout: int | None = None,
) -> LabResult:  # fmt: skip
    """Run a command to its end on the hosts of a network.

    folder: for the file that describes the hosts. received: signals, which are passed on as they are appended. cluster:
    cluster file of the hosts. stdout: file descriptor for the command's standard output. Raises `UserError` when it
    cannot be started.
    """
    before, started = network.traffic(), time.monotonic()
    if is_shardwise(command):
        words = [sys.executable, "-m", "shardwise", *command[1 if Path(command[0]).name == "shardwise" else 3 :]]
        file = folder / "hosts.json"
        HostFile(network.hosts, None if cluster is None else str(cluster)).write(file)
        starts = [(words, {VARIABLE: str(file)})]
    else:
        if shutil.which(command[0]) is None:
            raise UserError(f"there is no command {command[0]}: give the lab one such as shardwise or torchrun")
        agents = [agent_environment(network.hosts, node) for node in range(len(network.hosts))]
        starts = [([*host.enter, *command], env) for host, env in zip(network.hosts, agents, strict=True)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for words, variables in starts:
            processes.append(_start(words, variables, stdout))
        code = _watch(processes, received)
    finally:
        _end(processes)
    seconds = time.monotonic() - started
    traffic = [
        PortBytes(a.sent - b.sent, a.received - b.received) for a, b in zip(network.traffic(), before, strict=True)
    ]
    return LabResult(code, seconds, tuple(traffic))


def agent_environment(hosts: Sequence[LaunchHost], node: int) -> dict[str, str]:
    """Variables of the one process per host that starts ranks there: those of torchrun, and usual ones for others."""
    meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
    nodes = {"NNODES": str(len(hosts)), "NODE_RANK": str(node)}
    torchrun = {f"PET_{name}": value for name, value in {**meeting, **nodes}.items()}
    return {**meeting, **nodes, **torchrun, **hosts[node].environment()}


def _start(words: list[str], variables: dict[str, str], stdout: int | None) -> subprocess.Popen[bytes]:
    prctl, maker = ctypes.CDLL(None).prctl, os.getpid()

    def end_with_the_lab() -> None:
        prctl(_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != maker:
            os._exit(1)

    with os_errors(f"start {words[0]}"):
        return subprocess.Popen(
            words,
            env={**os.environ, **variables},
            stdout=stdout,
            # Of its own, so that Ctrl-C arrives once: from here.
            start_new_session=True,
            preexec_fn=end_with_the_lab,
        )


def _watch(processes: list[subprocess.Popen[bytes]], received: list[int]) -> int:
    """Exit code of the process that failed first, 0 if none did, once all have ended or failed."""
    passed, deadline, code = 0, None, 0
    while True:
        codes = [process.poll() for process in processes]
        while passed < len(received):
            _signal(processes, received[passed])
            passed += 1
        code = code or next((128 - item if item < 0 else item for item in codes if item), 0)
        if None not in codes:
            return code
        if code and deadline is None:
            deadline = time.monotonic() + GRACE
        if deadline is not None and time.monotonic() > deadline and not received:
            return code
        time.sleep(_POLL)


def _signal(processes: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Have every process end, at last by SIGKILL."""
    _signal(processes, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL)
    _signal(processes, signal.SIGKILL)
    for process in processes:
        process.wait()
