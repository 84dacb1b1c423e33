"""The faults of a training. Each function runs a trial to its end."""

import mmap
import os
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from faults.trial import Ended, Trial
from harness.hosts import hosts, why_not
from shardwise.runtime.job.hosts import VARIABLE

HANG = "3"
"""Seconds of `--hang` where a rank stops for good."""
RESUME = ".*resume with: shardwise train --resume "
DISK = "48m"
_LAB = threading.Lock()
"""The lab names its hosts by process: one at a time."""


def kill_ranks(trial: Trial, *, all_ranks: bool = False) -> None:
    restarts = trial.random.randrange(2)
    process = trial.start("--restarts", str(restarts), *_saves(trial))
    trial.moment(process)
    ranks = trial.ranks(process)
    whole = trial.whole()
    trial.send(ranks if all_ranks else trial.random.sample(ranks, min(1, len(ranks))), signal.SIGKILL)
    # A restart has all its ranks killed at most once; a kill that comes after the last step changes nothing.
    ended = trial.ended(process, {0: ""} if restarts else {0: "", 1: "SIGKILL" + RESUME * bool(whole)})
    _judge(trial, ended, whole)


def kill_launcher(trial: Trial) -> None:
    process = trial.start(*_saves(trial))
    trial.moment(process)
    whole = trial.whole()
    trial.killed = True
    process.send(signal.SIGKILL)
    _judge(trial, trial.ended(process, {0: "", -signal.SIGKILL: ""}), whole)


def signal_launcher(trial: Trial) -> None:
    number = trial.random.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    process = trial.start(*_saves(trial))
    trial.moment(process, started=True)
    whole = trial.whole()
    process.send(number)
    _judge(trial, trial.ended(process, {0: "", 128 + number: f"stopped by {number.name}.*{RESUME}"}), whole)


def pause_rank(trial: Trial) -> None:
    process = trial.start(*_saves(trial))
    trial.moment(process)
    ranks = trial.ranks(process)
    _pause(trial, trial.random.sample(ranks, min(1, len(ranks))))
    _judge(trial, trial.ended(process, {0: ""}), 0)


def stop_rank(trial: Trial) -> None:
    restarts = trial.random.randrange(2)
    process = trial.start("--hang", HANG, "--restarts", str(restarts), *_saves(trial))
    trial.moment(process, started=True)
    ranks = trial.ranks(process)
    whole = trial.whole()
    trial.send(trial.random.sample(ranks, min(1, len(ranks))), signal.SIGSTOP)
    # A busy machine may keep a rank of the restarted run waiting as long.
    says = "progress|has not (ended|begun)" if restarts else "suspended by a signal" + RESUME * bool(whole)
    _judge(trial, trial.ended(process, {0: "", 1: says}), whole)


def pause_launcher(trial: Trial) -> None:
    process = trial.start(*_saves(trial))
    trial.moment(process)
    _pause(trial, [process.pid])
    _judge(trial, trial.ended(process, {0: ""}), 0)


def _pause(trial: Trial, pids: list[int]) -> None:
    trial.send(pids, signal.SIGSTOP)
    time.sleep(trial.random.uniform(0.1, 2.0))
    trial.send(pids, signal.SIGCONT)


def fill_disk(trial: Trial) -> None:
    """The disk of the run is full from some moment on, for a while or until the run has ended."""
    freed, while_full = trial.random.random() < 0.5, trial.random.uniform(0.1, 1.0)
    trial.out.mkdir()
    with _mounted(trial.out, "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs"):
        process = trial.start(*_saves(trial))
        trial.until(process, (trial.out / "run.json").exists)  # a run begins in an empty folder
        trial.moment(process)
        whole, filler = trial.whole(), trial.out / "filler"
        _fill(trial.out, filler)
        trial.told.append(f"the disk is full, {f'for {while_full:.2f} s' if freed else 'until the end'}")
        if freed:
            time.sleep(while_full)
            filler.unlink()
        ended = trial.ended(process, {0: "", 2: "No space left on device" + RESUME * bool(whole)})
        filler.unlink(missing_ok=True)
        kept = shutil.copytree(trial.out, trial.folder / "kept")
    shutil.copytree(kept, trial.out, dirs_exist_ok=True)
    shutil.rmtree(kept)
    _judge(trial, ended, whole)


def _fill(folder: Path, filler: Path) -> None:
    with open(filler, "wb") as file:
        while free := os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize:
            with suppress(OSError):
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)


def make_read_only(trial: Trial) -> None:
    """The folder of checkpoints becomes read-only, as a file system does that has seen an error."""
    freed, while_read_only = trial.random.random() < 0.5, trial.random.uniform(0.1, 1.0)
    process = trial.start(*_saves(trial))
    folder = trial.out / "checkpoints"
    trial.until(process, folder.is_dir)
    with _mounted(folder, "--bind", str(folder)):
        trial.moment(process, started=True)
        # A mount with a file open for writing is busy: the moment is one between two saves.
        trial.until(process, lambda: _mount("-o", "remount,bind,ro", str(folder)))
        whole = trial.whole()
        trial.told.append(f"read-only, {f'for {while_read_only:.2f} s' if freed else 'until the end'}")
        if freed:
            time.sleep(while_read_only)
            _mount("-o", "remount,bind,rw", str(folder))
        ended = trial.ended(process, {0: "", 2: "Read-only file system" + RESUME * bool(whole)})
    _judge(trial, ended, whole)


def _mount(*words: str) -> bool:
    return subprocess.run(["mount", *words], capture_output=True).returncode == 0


@contextmanager
def _mounted(folder: Path, *words: str) -> Iterator[None]:
    subprocess.run(["mount", *words, str(folder)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def move_clock(trial: Trial) -> None:
    """`time.time` of launcher and ranks jumps, backwards or forwards, by seconds or by years."""
    file = trial.folder / "clock"
    file.write_bytes(struct.pack("<d", 0.0))
    process = trial.start(*_saves(trial), prepare=partial(shift_clock, str(file)))
    for _ in range(trial.random.randint(1, 3)):
        trial.moment(process)
        jump = trial.random.choice([-1, 1]) * 10 ** trial.random.uniform(0, 8.5)
        trial.told.append(f"the clock jumps by {jump:g} s")
        with open(file, "r+b") as shared:
            shared.write(struct.pack("<d", jump))
    _judge(trial, trial.ended(process, {0: ""}), 0)


def shift_clock(file: str) -> None:
    """Have `time.time` of this process, and of those that it forks, differ by the number in a file."""
    real = time.time
    with open(file, "r+b") as opened:
        memory = mmap.mmap(opened.fileno(), 8)
    time.time = lambda: real() + struct.unpack("<d", memory[:8])[0]


def start_two_writers(trial: Trial) -> None:
    """A second command for the same run: at the same moment, later, or to resume what another one resumes."""
    how = trial.random.choice(["at once", "later", "resume", "both resume"])
    words = ["train", "--resume", str(trial.out)]
    first = trial.start()
    if how == "both resume":
        trial.moment(first, first=4, started=True)
        trial.killed = True
        first.send(signal.SIGKILL)
        trial.ended(first, {0: "", -signal.SIGKILL: ""})
        first = trial.start(words=words)
    elif how != "at once":
        trial.moment(first, first=1 if how == "later" else 4, started=how == "resume")
    second = trial.start(words=None if how in ("at once", "later") else words)
    ends = [
        trial.ended(process, {0: "", 2: "in use|already holds|no whole|has done|is not empty"})
        for process in (first, second)
    ]
    if sorted(end.code for end in ends) != [0, 2]:
        trial.problem("unclear", f"{how}: the two end with {ends[0].code} and {ends[1].code}")
    _judge(trial, min(ends), 0)


def damage_file(trial: Trial) -> None:
    """After an end that was not its own, a file of the run or of its newest checkpoint is not as it was written."""
    process = trial.start("--keep-last", "0")
    trial.moment(process, first=8, started=True)
    how = trial.random.choice([signal.SIGTERM, signal.SIGKILL])
    trial.killed = how == signal.SIGKILL
    process.send(how)
    ended = trial.ended(process, {0: "", -signal.SIGKILL: "", 128 + signal.SIGTERM: "stopped by SIGTERM" + RESUME})
    if ended.code:
        newest = trial.out / "checkpoints" / f"step-{trial.whole()}"
        files = [
            *sorted(newest.iterdir()),
            *sorted(newest.iterdir()),
            trial.out / "run.json",
            trial.out / "events.jsonl",
        ]
        file = trial.random.choice(files)
        damage = trial.random.choice(sorted(DAMAGES))
        trial.told.append(f"{damage}: {file.relative_to(trial.out)}")
        DAMAGES[damage](trial, file)
        trial.whole_log = file.name != "events.jsonl"
        ended = ended._replace(line="")  # the user comes back later
    trial.continue_to_the_end(ended)


def _flip(trial: Trial, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[trial.random.randrange(len(data))] ^= 1 << trial.random.randrange(8)
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Trial, Path], object]] = {
    "a bit flips": _flip,
    "cut short": lambda trial, file: os.truncate(file, trial.random.randrange(file.stat().st_size)),
    "empty": lambda trial, file: os.truncate(file, 0),
    "removed": lambda trial, file: file.unlink(),
    "zeros at the end": lambda trial, file: os.truncate(file, file.stat().st_size + trial.random.randint(1, 5000)),
}


def cut_link(trial: Trial) -> None:
    """Two hosts are cut off from each other, for less or for longer than the run waits."""
    patient, cut = trial.random.random() < 0.5, trial.random.uniform(0.2, 3.0)
    with _LAB, hosts("1Gb/s", 2, trial.folder) as (network, variables):
        process = trial.start(*([] if patient else ["--hang", HANG]), variables={VARIABLE: variables[VARIABLE]})
        trial.moment(process, started=True)
        whole = trial.whole()
        _set_link(network.hosts[1].name, "down")
        trial.told.append(f"the link is cut, {f'for {cut:.2f} s' if patient else 'until the end'}")
        if patient:
            time.sleep(cut)
            _set_link(network.hosts[1].name, "up")
        ended = trial.ended(process, {0: ""} if patient else {0: "", 1: "made (no )?progress|lost a peer"})
    _judge(trial, ended, whole)


def _set_link(host: str, state: str) -> None:
    subprocess.run(["ip", "-n", host, "link", "set", "dev", "eth0", state], check=True)


def _saves(trial: Trial) -> list[str]:
    """How the run saves: what is on disk is not copied into memory for that."""
    later = trial.random.randrange(2) and "nvme" not in trial.fault.layout
    return ["--save-async"] * later + ["--keep-last", trial.random.choice(["0", "1", "3"])]


def _judge(trial: Trial, ended: Ended, whole: int) -> None:
    """whole: step of the newest whole checkpoint at the moment of the fault."""
    trial.check_kept(whole)
    trial.continue_to_the_end(ended)


KINDS: dict[str, Callable[[Trial], object]] = {
    "rank killed": kill_ranks,
    "all ranks killed": partial(kill_ranks, all_ranks=True),
    "launcher killed": kill_launcher,
    "launcher signaled": signal_launcher,
    "rank paused": pause_rank,
    "rank stopped": stop_rank,
    "launcher paused": pause_launcher,
    "disk full": fill_disk,
    "read-only": make_read_only,
    "clock jumps": move_clock,
    "two writers": start_two_writers,
    "damaged file": damage_file,
    "link cut": cut_link,
}


def missing(kind: str, mounts: bool) -> str:
    """Why a fault cannot be made on this machine; empty where it can. mounts: whether this process may mount."""
    if kind in ("disk full", "read-only") and not mounts:
        return "no mounts here: needs unshare of util-linux, as root or with user namespaces"
    return why_not() if kind == "link cut" else ""
