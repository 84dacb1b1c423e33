"""The launcher: starts the local ranks, watches them, and leaves no process behind, whatever ends first.

It knows nothing about training: a command line goes in, an exit code comes out. The ranks find in their environment:

- `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `OMP_NUM_THREADS` as torch's own launcher sets them;
- `SHARDWISE_RENDEZVOUS`: the `init_method` of the process group, a file on one host unless a port was asked for;
- `SHARDWISE_ERROR_FILE`: where a rank that fails writes its `Failure` before it exits;
- `SHARDWISE_PULSE`: the file of its signs of life (`pulse.py`), by which the launcher finds a rank that is stuck;
- `SHARDWISE_STACK`: where it writes where it stands when SIGUSR1 asks it to; made by the rank when it can;
- `SHARDWISE_PARENT`: the launcher's process id, for `die_with_parent`.

Imports no torch.
"""

import ctypes
import json
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from shardwise.errors import DivergedError, UserError
from shardwise.report.files import write_whole
from shardwise.runtime.job import pulse
from shardwise.runtime.job.hosts import PORT, HostFile, Placement
from shardwise.runtime.job.locks import temporary_folder
from shardwise.runtime.job.signals import handled

GRACE = 1.0
"""Seconds that the other ranks get to report what they saw, after one has failed."""
ORDERLY = 300.0
"""Seconds that ranks get to save and end after a signal."""
LAST_WORDS = 1.0
"""Seconds between SIGTERM and SIGKILL."""
_POLL = 0.02
_LOOK = 0.25

USER_MISTAKE = 2
RANK_FAILED = 1
DIVERGED = 3
INTERRUPTED = 128 + signal.SIGINT
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunFailed(RuntimeError):
    """A rank died, or failed for a reason that is not its user's. The message is one line."""


@dataclass(frozen=True)
class Failure:
    """A rank's reason for its failure. kind: a user's mistake, training that diverged, a consequence of another rank's
    end, or anything else.

    step: the training step, if it had begun one. time: seconds since the epoch.
    """

    kind: Literal["user", "diverged", "peer", "error"]
    rank: int
    step: int | None
    message: str
    time: float = field(default_factory=time.time)

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Failure | None":
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error tells that another rank has gone, or keeps this one waiting."""
    words = ("lost a peer", "gloo", "Connection", "Timed out", "NCCL", "ProcessGroup", "has ended", "did not come")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def reason(error: BaseException) -> str:
    """The first line of an error; of what gloo says only the reason, without its source file and its advice."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"\[\S+\.cc:\d+\] ", "", lines[0]).partition(". This is typically")[0]


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


@dataclass(frozen=True)
class Ending:
    """End of a launch. code: 0 when all ranks ended with 0; 2 when one reports a user's mistake, 3 when training has
    diverged, 1 when a rank dies or is stuck, 130, 143 or 129 after SIGINT, SIGTERM or SIGHUP. line: why, on one line,
    empty when all is well. lost: ranks that were killed from outside. stuck, stack: the rank that made no progress, and
    where its threads stood.
    """

    code: int
    line: str = ""
    lost: tuple[int, ...] = ()
    stuck: int | None = None
    stack: str = ""

    def error(self) -> UserError | DivergedError | KeyboardInterrupt | RunFailed | None:
        """The exception that a bad end is to the caller; None where all is well."""
        kinds = {0: None, USER_MISTAKE: UserError, DIVERGED: DivergedError, INTERRUPTED: KeyboardInterrupt}
        kind = kinds.get(self.code, RunFailed)
        return kind(self.line) if kind else None


def supervise(
    command: list[str],
    ranks: int,
    *,
    port: int = 0,
    threads: int = 1,
    loopback: bool = True,
    joined: bool = False,
    env: dict[str, str] | None = None,
    rank0_stdout: int | None = None,
    patience: float = ORDERLY,
    hang: float | None = None,
    stop: list[int] | None = None,
) -> Ending:
    """Run `command` as `ranks` local processes until all have ended, or one has failed and the others were stopped.

    They are spread over the hosts that the environment names (`hosts.py`). port: where the ranks meet, on 127.0.0.1 or
    the first host; 0 lets those of one host meet in a file. threads: of each rank's matrix products.
    loopback: have gloo talk over `lo`. joined: start rank 0 alone, in a group of ranks that another launcher
    has started like this process. env: added to the environment. Rank 0's output passes through, that of others is
    kept for the last line of a rank that dies speechless.
    rank0_stdout: file descriptor for rank 0's standard output. patience: seconds that ranks get to end in order after a
    signal; a second signal ends it. hang: seconds without a sign of life after which a rank counts as stuck; None for
    ranks that give none. stop: signals that are appended to it count as received, for callers outside of the main
    thread. Raises `UserError` when the port is in use, and for a bad file of hosts.
    """
    if port:
        check_port(port)
    placement = Placement(ranks, () if joined else HostFile.from_environment().hosts, joined)
    received: list[int] = [] if stop is None else stop
    with temporary_folder() as folder, handled(FORWARDED, lambda number, frame: received.append(number)):
        crew = _Crew(command, placement, folder, received, patience, hang)
        shared = {
            **(env or {}),
            "OMP_NUM_THREADS": str(threads),
            # Progress must be seen while it happens, through a pipe too, and last words before a crash.
            "PYTHONUNBUFFERED": "1",
            "SHARDWISE_PARENT": str(os.getpid()),
            "SHARDWISE_RENDEZVOUS": "env://" if joined else f"file://{folder}/store",
        }
        if not joined:
            shared["WORLD_SIZE"] = str(ranks)
        if port or placement.hosts:
            shared |= {"MASTER_ADDR": placement.address, "MASTER_PORT": str(port or PORT)}
            shared["SHARDWISE_RENDEZVOUS"] = "env://"
        if loopback and not joined:
            shared["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            crew.start(shared, rank0_stdout)
            return crew.watch()
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


def _suspended_in_words(ranks: list[int]) -> str:
    """What the end of a run says of suspended ranks; empty without any."""
    if not ranks:
        return ""
    verb = "is" if len(ranks) == 1 else "are"
    return f"; {pulse.ranks_in_words(ranks)} {verb} suspended by a signal, such as SIGSTOP"


@dataclass
class _Rank:
    """A local process. last_alive: when it was last seen alive. code: as Popen's returncode, None while it runs."""

    rank: int
    process: subprocess.Popen[bytes]
    error_file: Path
    log: Path | None
    stack_file: Path
    pulse: mmap.mmap
    last_alive: float
    code: int | None = None

    def poll(self) -> int | None:
        """Look without reaping: while the zombie remains, its process group number is not used again."""
        if self.code is None:
            now = time.time()
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                self.last_alive = now
            else:
                self.code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        return self.code

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    @property
    def ending(self) -> str:
        assert self.code is not None
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            name = signal.Signals(-self.code).name
            hint = " (a file that it reads was cut short, or shared memory is full)" if name == "SIGBUS" else ""
            return f"was killed by {name}{hint}"
        except ValueError:
            return f"was killed by signal {-self.code}"

    @property
    def suspended(self) -> bool:
        """Whether a signal such as SIGSTOP keeps it from running, where the system says so."""
        with suppress(OSError, IndexError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False

    def stack(self) -> str:
        """Stacks of its threads, if it still answers: Python's fault handler needs no lock for that."""
        if not self.stack_file.exists():
            return ""
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        with suppress(OSError):
            return self.stack_file.read_text(errors="replace")
        return ""

    def last_words(self) -> str:
        if self.log is None:
            return ""
        with suppress(OSError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            return lines[-1].strip()[:300] if lines else ""
        return ""


@dataclass
class _Crew:
    command: list[str]
    placement: Placement
    folder: Path
    received: list[int]
    patience: float
    hang: float | None
    ranks: list[_Rank] = field(default_factory=list)
    looked: float = 0.0

    @property
    def size(self) -> int:
        return self.placement.ranks

    def start(self, shared: dict[str, str], rank0_stdout: int | None) -> None:
        for rank in range(self.size):
            error_file = self.folder / f"rank-{rank}.json"
            pulse_file, stack_file = self.folder / f"pulse-{rank}", self.folder / f"stack-{rank}"
            variables = {
                **self.placement.environment(rank),
                "SHARDWISE_ERROR_FILE": str(error_file),
                "SHARDWISE_PULSE": str(pulse_file),
                "SHARDWISE_STACK": str(stack_file),
            }
            memory = pulse.create(pulse_file)
            log = self.folder / f"rank-{rank}.log" if rank else None
            with open(log or os.devnull, "wb") as output:
                process = subprocess.Popen(
                    self.placement.command(rank, self.command),
                    env={**os.environ, **shared, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=output if log else rank0_stdout,
                    stderr=output if log else None,
                    start_new_session=True,
                )
            self.ranks.append(_Rank(rank, process, error_file, log, stack_file, memory, time.time()))

    def watch(self) -> Ending:
        """Wait for the end, good or bad; of a bad one, until no process runs."""
        started = time.monotonic()
        while not self.received:
            codes = self._codes()
            if any(codes):
                self._wait(GRACE)
                return self._failed()
            if None not in codes:
                return Ending(0)
            if stuck := self._stuck(started):
                return self._hung(*stuck)
            time.sleep(_POLL)
        return self._interrupted()

    def _interrupted(self) -> Ending:
        """The ranks get SIGTERM whatever the signal was: until they listen, it ends them without a word."""
        number = self.received[0]
        for rank in self.ranks:
            rank.send(signal.SIGTERM)
        started, deadline = time.monotonic(), time.monotonic() + self.patience
        while None in self._codes() and time.monotonic() < deadline and len(self.received) == 1:
            if stuck := self._stuck(started):
                hung = self._hung(*stuck)
                return replace(hung, code=128 + number, line=f"stopped, without saving: {hung.line}")
            time.sleep(_POLL)
        # A rank that SIGTERM ended did not listen yet and had nothing to lose; that others miss it is no failure.
        codes = self._codes()
        if -signal.SIGTERM not in codes and any(code not in (None, 0, INTERRUPTED) for code in codes):
            failed = self._failed()
            if failed.code in (USER_MISTAKE, DIVERGED):
                return failed
            return replace(failed, code=128 + number, line=f"stopped, without saving: {failed.line}")
        self.stop()
        whose = f"all {self.size} ranks have" if self.size > 1 else "the rank has"
        line = f"stopped by {signal.Signals(number).name}: {whose} ended"
        return Ending(128 + number, line)

    def _stuck(self, started: float) -> tuple[int, str] | None:
        """(rank, line about it) when one makes no progress."""
        now = time.monotonic()
        if self.hang is None or now - self.looked < _LOOK:
            return None
        self.looked = now
        signs = {rank.rank: pulse.signs_in(rank.pulse) for rank in self.ranks if rank.code is None}
        if verdict := pulse.stuck(signs, self.hang, now):
            return verdict
        for rank, (training, _) in signs.items():
            since = now - max(started, training.time)
            if training.state == pulse.IDLE and since > pulse.STARTING + self.hang:
                what = "ended" if training.time else "begun to train"
                return rank, f"rank {rank} has not {what} for {since:.0f} s"
        return None

    def _hung(self, number: int, line: str) -> Ending:
        suspended = self._suspended()
        if suspended:
            number, line = suspended[0], line + _suspended_in_words(suspended)
        stack = self.ranks[number].stack()
        self.stop()
        return Ending(RANK_FAILED, line + self._others(), stuck=number, stack=stack)

    def _suspended(self) -> list[int]:
        """Suspended ranks: inside a collective they look like the ranks that wait for them."""
        return [rank.rank for rank in self.ranks if rank.code is None and rank.suspended]

    def _codes(self) -> list[int | None]:
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

        A process that is killed loses its connections a moment before it is seen to be dead: so whoever has lost a peer
        is the cause only when there is no other.
        """
        failed = []
        for rank in self.ranks:
            report = Failure.read(rank.error_file)
            if report or rank.code:
                late = report is not None and report.kind == "peer"
                failed.append((late, report.time if report else rank.last_alive, rank.rank, rank, report))
        *_, rank, report = min(failed, key=lambda entry: entry[:3])
        return rank, report

    def _failed(self) -> Ending:
        rank, report = self._cause()
        lost = tuple(item.rank for item in self.ranks if item.code is not None and item.code < 0)
        signs = {item.rank: pulse.signs_in(item.pulse) for item in self.ranks}
        suspended = _suspended_in_words(self._suspended())
        self.stop()
        if report and report.kind in ("user", "diverged"):
            return Ending(USER_MISTAKE if report.kind == "user" else DIVERGED, report.message)
        sign = signs[rank.rank][pulse.TRAINING]
        if report:
            step = "" if report.step is None else f" at step {report.step}"
            # A rank that lost a peer says itself in which collective.
            place, words = sign.place if sign.state == pulse.WORKING else step, report.message
            what = f"rank {rank.rank} failed{place}: {words}"
        else:
            words = rank.last_words()
            what = f"rank {rank.rank} {rank.ending}{sign.place}" + (f": {words}" if words else "")
        return Ending(RANK_FAILED, what + pulse.waiters(signs, rank.rank) + suspended + self._others(), lost)

    def _others(self) -> str:
        return {1: "", 2: "; the other rank was stopped"}.get(self.size, f"; the other {self.size - 1} were stopped")

    def stop(self) -> None:
        """End whatever still runs, reap everything. May be called again."""
        running = [rank for rank in self.ranks if rank.process.returncode is None]
        if None in self._codes():
            for rank in running:
                rank.send(signal.SIGTERM)
            self._wait(LAST_WORDS)
        for rank in running:
            rank.send(signal.SIGKILL)
        for rank in running:
            rank.code = rank.process.wait()
