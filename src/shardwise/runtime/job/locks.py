"""Locks that the kernel releases when their holder dies, and temporary folders that are removed even then.

flock(2) on an open file: the lock is free again when its holder closes the file or ends, also by a signal. Ranks do not
inherit the file. On file systems without locks nothing is locked. Imports no torch.
"""

import fcntl
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwise.errors import UserError, os_errors
from shardwise.report.run_directory import LOCK

_PREFIX, _OWNER = "shardwise-", ".owner"


@contextmanager
def run_lock(out: Path) -> Iterator[None]:
    """Keep other trainings out of a run's directory, which exists. Raises `UserError` naming the process that holds it.

    The lock is the file `.lock`, which says who holds it, and is gone afterwards. Readers need no lock.
    """
    path = out / LOCK
    with os_errors(f"write {path}", "; choose another --out"):
        try:
            handle = _locked(path)
        except BlockingIOError:
            raise UserError(
                f"{out} is in use by another training{_holder(path)}: wait until it has ended, or choose another --out"
            ) from None
    try:
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        with suppress(OSError):  # a full disk: the lock holds without it
            os.ftruncate(handle, 0)
            os.pwrite(handle, holder, 0)
        yield
    finally:
        # Before the lock is released: another one's file would go otherwise.
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def _locked(path: Path) -> int:
    """An open file at `path`, locked where the file system has locks. Raises `BlockingIOError` when another one is."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise
        except OSError:
            return handle
        # The holder before may have removed the file after it was opened here.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)


def _holder(path: Path) -> str:
    """Holder of a run's lock, in words that follow on a line; empty when the file does not say."""
    try:
        data = json.loads(path.read_bytes()[:1000])
        return f" (process {int(data['pid'])} on {str(data['host'])[:100]})"
    except (OSError, ValueError, TypeError, KeyError):
        return ""


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """A private folder for the files of a launch, which is gone afterwards; those of launchers that were killed are
    removed. parent: where, in place of the system's folder for temporary files."""
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent) as name:
        folder = Path(name)
        # Renamed only once locked: an unlocked file belongs to a process that has ended.
        handle = os.open(folder / f"{_OWNER}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / f"{_OWNER}.new").rename(folder / _OWNER)
            yield folder
        finally:
            os.close(handle)


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's folders whose owner has ended without doing so."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            owner = os.lstat(folder / _OWNER)
            if owner.st_uid != os.getuid() or not stat.S_ISREG(owner.st_mode):
                continue
            handle = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
