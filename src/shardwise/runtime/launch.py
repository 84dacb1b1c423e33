"""The launcher: starts the local ranks, watches them, and leaves no process behind, whatever ends first.

It knows nothing about training: a command line goes in, an exit code comes out. The ranks find in their environment:

- `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `OMP_NUM_THREADS` as torch's own launcher sets them;
- `SHARDWISE_RENDEZVOUS`: the `init_method` of the process group, a file unless a port was asked for;
- `SHARDWISE_ERROR_FILE`: where a rank that fails writes its `Failure` before it exits;
- `SHARDWISE_PARENT`: the launcher's process id, for `die_with_parent`.

Imports no torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from shardwise.errors import UserError

GRACE = 1.0
"""Seconds that the other ranks get to report what they saw, after one has failed."""
ORDERLY = 300.0
"""Seconds that ranks get to save and end after a signal."""
LAST_WORDS = 1.0
"""Seconds between SIGTERM and SIGKILL."""
_POLL = 0.02

USER_MISTAKE = 2
RANK_FAILED = 1
INTERRUPTED = 128 + signal.SIGINT
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunFailed(RuntimeError):
    """A rank died, or failed for a reason that is not its user's. The message is one line."""


def say(line: str) -> None:
    """Write a line to standard error."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Failure:
    """How a rank says why it fails. step: the training step, if it had begun one. time: seconds since the epoch."""

    kind: Literal["user", "error"]
    rank: int
    step: int | None
    message: str
    time: float = field(default_factory=time.time)

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Failure | None:
        """What the rank left, None when it left nothing."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None


def die_with_parent() -> None:
    """Have the kernel kill this process when its launcher dies, even by SIGKILL. Does nothing without a launcher.

    See prctl(2), PR_SET_PDEATHSIG. A launcher that died before the call is noticed by its process id.
    """
    parent = os.environ.get("SHARDWISE_PARENT")
    if not parent or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)


def launch(
    command: list[str],
    ranks: int,
    *,
    port: int = 0,
    threads: int = 1,
    loopback: bool = True,
    env: dict[str, str] | None = None,
    logs: Path | None = None,
    rank0_stdout: int | None = None,
    patience: float = ORDERLY,
    echo: Callable[[str], None] = say,
) -> int:
    """Run `command` as `ranks` local processes until all have ended; the exit code is 0 when all ended with 0.

    port: of 127.0.0.1, where the ranks meet; 0 lets them meet in a file. threads: of each rank's matrix products.
    loopback: have gloo talk over `lo`. env: added to the environment. logs: folder that gets the output of every rank
    but 0, whose output passes through; None keeps it for the last line of a rank that dies speechless only.
    rank0_stdout: file descriptor for rank 0's standard output. patience: seconds that ranks get to end in order after a
    signal; a second signal ends it. echo: gets the one line that tells why a run failed.
    Returns 2 when a rank reports a user's mistake, 1 when a rank dies, 130, 143 or 129 after SIGINT, SIGTERM or SIGHUP.
    Raises `UserError` when the port is in use.
    """
    if port:
        check_port(port)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder, _signals() as received:
        crew = _Crew(command, ranks, Path(folder), logs or Path(folder), received, patience)
        shared = {
            **(env or {}),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": str(threads),
            # Progress must be seen while it happens, through a pipe too, and last words before a crash.
            "PYTHONUNBUFFERED": "1",
            "SHARDWISE_PARENT": str(os.getpid()),
            "SHARDWISE_RENDEZVOUS": "env://" if port else f"file://{folder}/store",
        }
        if port:
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if loopback:
            shared["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            crew.start(shared, rank0_stdout)
            return crew.watch(echo)
        finally:
            crew.stop()


def check_port(port: int) -> None:
    """Raise `UserError` when ranks cannot meet at `port` of this host."""
    if not 0 < port < 1 << 16:
        raise UserError(f"port {port} does not exist; choose one between 1024 and 65535, or none")
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UserError(
            f"port {port} cannot be used ({os.strerror(error.errno or 0)}); choose another one, or leave --port out: "
            "none is needed"
        ) from None


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The list of signals that arrive meanwhile; those that the caller ignores remain ignored."""
    received: list[int] = []
    before = {}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    # Only the main thread may install handlers; a launch from another one leaves signals to its program.
    if threading.current_thread() is threading.main_thread():
        for number in _FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Rank:
    """A local process. last_alive: when it was last seen alive. code: as Popen's returncode, None while it runs."""

    rank: int
    process: subprocess.Popen[bytes]
    error_file: Path
    log: Path | None
    last_alive: float
    code: int | None = None

    def poll(self) -> int | None:
        """Look without reaping: while the zombie remains, nobody else gets the number of its process group."""
        if self.code is None:
            now = time.time()
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                self.last_alive = now
            else:
                self.code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        return self.code

    def send(self, number: int) -> None:
        """Signal the rank and whatever it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        assert self.code is not None
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            return f"was killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"was killed by signal {-self.code}"

    def last_words(self) -> str:
        """The last line of its output, when that was caught."""
        if self.log is None:
            return ""
        with suppress(OSError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            return lines[-1].strip()[:300] if lines else ""
        return ""


@dataclass
class _Crew:
    """All ranks of one launch."""

    command: list[str]
    size: int
    folder: Path
    logs: Path
    received: list[int]
    patience: float
    ranks: list[_Rank] = field(default_factory=list)

    def start(self, shared: dict[str, str], rank0_stdout: int | None) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        for rank in range(self.size):
            error_file = self.folder / f"rank-{rank}.json"
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "SHARDWISE_ERROR_FILE": str(error_file)}
            log = self.logs / f"rank-{rank}.log" if rank else None
            with open(log or os.devnull, "wb") as output:
                process = subprocess.Popen(
                    self.command,
                    env={**os.environ, **shared, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=output if log else rank0_stdout,
                    stderr=output if log else None,
                    start_new_session=True,
                )
            self.ranks.append(_Rank(rank, process, error_file, log, time.time()))

    def watch(self, echo: Callable[[str], None]) -> int:
        """Wait for the end, good or bad; a bad one is told to `echo` after the others have stopped."""
        while not self.received:
            codes = self._codes()
            if any(codes):
                self._wait(GRACE)
                break
            if None not in codes:
                return 0
            time.sleep(_POLL)
        if self.received:
            return self._interrupted(echo)
        cause = self._cause()
        self.stop()
        return self._tell(*cause, echo)

    def _interrupted(self, echo: Callable[[str], None]) -> int:
        number = self.received[0]
        for rank in self.ranks:
            rank.send(number)
        self._wait(self.patience)
        self.stop()
        echo(f"stopped by {signal.Signals(number).name}: all {self.size} ranks have ended")
        return 128 + number

    def _codes(self) -> list[int | None]:
        """Exit codes, None of those that run."""
        return [rank.poll() for rank in self.ranks]

    def _wait(self, seconds: float) -> None:
        """Until all have ended, for at most `seconds`; a further signal ends the patience."""
        deadline, signals = time.monotonic() + seconds, len(self.received)
        while time.monotonic() < deadline and len(self.received) == signals:
            if None not in self._codes():
                return
            time.sleep(_POLL)

    def _cause(self) -> tuple[_Rank, Failure | None]:
        """The rank that failed first, and its report.

        A rank that lost its peers reports later than the one they lost was last seen alive.
        """
        failed = []
        for rank in self.ranks:
            report = Failure.read(rank.error_file)
            if report or rank.code:
                failed.append((report.time if report else rank.last_alive, rank.rank, rank, report))
        _, _, rank, report = min(failed, key=lambda entry: entry[:2])
        return rank, report

    def _tell(self, rank: _Rank, report: Failure | None, echo: Callable[[str], None]) -> int:
        if report and report.kind == "user":
            echo(report.message)
            return USER_MISTAKE
        if report:
            at = "" if report.step is None else f" at step {report.step}"
            what = f"rank {rank.rank} failed{at}: {report.message}"
        else:
            words = rank.last_words()
            what = f"rank {rank.rank} {rank.ending}" + (f": {words}" if words else "")
        others = {1: "", 2: "; the other rank was stopped"}.get(self.size, f"; the other {self.size - 1} were stopped")
        echo(what + others)
        return RANK_FAILED

    def stop(self) -> None:
        """End whatever still runs, reap everything, drop empty logs. May be called again."""
        running = [rank for rank in self.ranks if rank.process.returncode is None]
        if None in self._codes():
            for rank in running:
                rank.send(signal.SIGTERM)
            self._wait(LAST_WORDS)
        for rank in running:
            rank.send(signal.SIGKILL)
        for rank in running:
            rank.code = rank.process.wait()
            if rank.log and rank.log.exists() and not rank.log.stat().st_size:
                rank.log.unlink()
