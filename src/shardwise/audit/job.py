"""A program that is audited: started with the recorder in every process, watched for ranks that wait for one another,
and ended when they do."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwise.audit.differences import Difference, first_difference
from shardwise.audit.reading import RECORDINGS, RankRecording, read_folder
from shardwise.audit.recorder import VARIABLE
from shardwise.codec import Json
from shardwise.errors import UserError, os_errors

_ENDED = "ended.json"
"""File in a recording's folder: an `_Ended`."""
_TICK = 0.1
_GRACE = 5.0
"""Seconds for a program to end by itself after SIGTERM."""
_BUSY = 0.3
"""Share of a core above which a rank that waits is taken to compute."""


@dataclass(frozen=True)
class AuditedJob:
    """A program that has ended."""

    code: int
    """Exit code; 128 + signal for a program that was ended by one."""
    seconds: float
    recordings: list[RankRecording]
    difference: Difference | None
    hung: bool
    """Whether it was ended because its ranks waited for one another."""


@dataclass(frozen=True)
class _Ended(Json):
    json_name = "the end of a recording"
    json_checked = True

    code: int
    seconds: float
    hung: bool
    interrupted: bool
    """Whether a signal was passed on, after which no rank is to blame."""
    died: dict[str, float]
    """Process id -> moment of its end, without processes that the audit ended."""


@dataclass
class _Watched:
    """Process ids of ranks, and when they were gone."""

    folder: Path
    died: dict[int, float] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    seen: set[int] = field(default_factory=set)

    def wait(self, seconds: float) -> None:
        """Wait, and note ranks that end meanwhile in the order in which they do."""
        for file in self.folder.glob(RECORDINGS):
            pid = int(file.stem.split("-")[1])
            if pid not in self.seen:
                self.seen.add(pid)
                try:
                    self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                except ProcessLookupError:
                    self.died[pid] = time.time()
                except OSError:  # of another host's process, or without pidfds
                    continue
        if not self.selector.get_map():
            time.sleep(seconds)
            return
        for key, _ in self.selector.select(seconds):
            self.died[key.data] = time.time()
            self.selector.unregister(key.fd)
            os.close(key.fd)

    def progress(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob(RECORDINGS))

    def close(self) -> None:
        """End the ranks that live on: launchers start them in other sessions."""
        for key in list(self.selector.get_map().values()):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(key.fd, signal.SIGKILL)
            os.close(key.fd)
        self.selector.close()


def audited_environment(folder: Path) -> dict[str, str]:
    """Variables that have every Python process of a program record into a folder."""
    injected = str(Path(__file__).parent / "injected")
    path = [injected, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, VARIABLE: str(folder.resolve()), "PYTHONPATH": os.pathsep.join(path)}


def check_command(command: Sequence[str]) -> None:
    """Raise `UserError` for a program that is not there."""
    if shutil.which(command[0]) is None:
        raise UserError(f"there is no command {command[0]}: give one such as torchrun or python")


def run_audited(
    command: Sequence[str], folder: Path, hang: float, received: list[int], note: Callable[[str], None],
    *, stdout: int | None = None,
) -> AuditedJob:  # fmt: skip
    """Run a program to its end, or until its ranks wait for one another without progress.

    hang: seconds without any rank's progress after which they are looked at. received: signals, which are passed on as
    they are appended. note: gets a line when ranks wait for one that computes. Raises `UserError` when it cannot start.
    """
    check_command(command)
    began = time.monotonic()
    with os_errors(f"start {command[0]}"):
        process = subprocess.Popen(command, env=audited_environment(folder), stdout=stdout, start_new_session=True)
    watched = _Watched(folder)
    try:
        difference = _watch(process, watched, hang, received, note)
        before = dict(watched.died)
    finally:
        _end(process)
        watched.wait(0)
        watched.close()
    code, hung = process.returncode, difference is not None
    died = {} if received else before if hung else watched.died  # ranks that were ended did not die
    code, seconds = 128 - code if code < 0 else code, time.monotonic() - began
    ended = _Ended(code, seconds, hung, bool(received), {str(pid): at for pid, at in died.items()})
    with suppress(OSError):
        (folder / _ENDED).write_text(json.dumps(ended.to_json()))
    job = _job(folder, ended)
    return replace(job, difference=difference) if hung or received else job


def read_job(folder: Path) -> AuditedJob:
    """The job of a recording that was kept. Raises `UserError` for a damaged one."""
    try:
        text = (folder / _ENDED).read_text()
    except OSError:  # the audit itself was killed
        return _job(folder, None)
    try:
        return _job(folder, _Ended.from_json(json.loads(text)))
    except (ValueError, UserError):
        raise UserError(f"{folder / _ENDED} is damaged, or of another version of shardwise: record it again") from None


def _job(folder: Path, ended: _Ended | None) -> AuditedJob:
    recordings = read_folder(folder, {int(pid): at for pid, at in ended.died.items()} if ended else {})
    if ended and not ended.code:  # whatever was raised was caught
        recordings = [replace(one, error=None) for one in recordings]
    difference = None if ended and ended.interrupted else first_difference(recordings)
    code, seconds, hung = (ended.code, ended.seconds, ended.hung) if ended else (0, 0.0, False)
    return AuditedJob(code, seconds, recordings, difference, hung)


def _watch(
    process: subprocess.Popen[bytes], watched: _Watched, hang: float, received: list[int], note: Callable[[str], None]
) -> Difference | None:
    """Wait for the end. Returns what ranks that wait for one another differ in."""
    size, since, passed, used, noted = -1, time.monotonic(), 0, {}, ""
    while process.poll() is None:
        watched.wait(_TICK)
        while passed < len(received):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, received[passed])
            passed += 1
        now = watched.progress()
        if now != size or not watched.seen:
            size, since, used = now, time.monotonic(), {pid: _cpu(pid) for pid in watched.seen}
        elif time.monotonic() - since > hang:
            recordings = read_folder(watched.folder, watched.died)
            busy = [pid for pid, before in used.items() if _cpu(pid) - before > _BUSY * (time.monotonic() - since)]
            difference = first_difference(recordings)
            if difference is not None and _stuck(recordings, difference, bool(busy)):
                return difference
            if difference is not None and difference.text != noted:
                noted = difference.text
                note(f"no rank has made a call for {time.monotonic() - since:.0f} s: {'; '.join(difference.waiting)}")
            since, used = time.monotonic(), {pid: _cpu(pid) for pid in watched.seen}
    return None


def _stuck(recordings: Sequence[RankRecording], difference: Difference, busy: bool) -> bool:
    """Whether ranks can never meet: every one that lives waits, and they wait for something that will not come."""
    alive = [one for one in recordings if one.exit is None and one.died is None]
    waiting = [one for one in alive if any(call.state != "completed" for call in one.calls)]
    if not waiting or len(waiting) < len(alive):
        return False
    gone = len(alive) < len(recordings)
    return gone or not busy or difference.kind in ("size", "dtype", "operation", "root")


def _cpu(pid: int) -> float:
    """Seconds of a core that a process has used; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            numbers = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have the program and its ranks end, at last by SIGKILL."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
