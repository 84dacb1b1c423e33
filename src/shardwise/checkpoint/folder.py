"""A run's checkpoints: `step-N` folders, of which the newest whole one counts."""

import fcntl
import itertools
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardwise.checkpoint.file_io import DamagedError
from shardwise.checkpoint.manifest import NAME, PART_NAME
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.writer import sync_folder
from shardwise.errors import UserError, near_path, os_errors

_STEP = re.compile(r"step-([0-9]{1,15})", re.ASCII)


def steps(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything named like a checkpoint, whole or not, ascending.

    Raises `UserError` when the folder cannot be listed.
    """
    with os_errors(f"list {folder}"):
        if not folder.is_dir():
            return []
        return sorted(
            (int(m[1]), path) for path in folder.iterdir() if (m := _STEP.fullmatch(path.name)) and path.is_dir()
        )


def latest(folder: Path, warn: Callable[[str], object] = lambda line: None) -> Checkpoint | None:
    """The newest whole checkpoint in a run's folder of checkpoints; None when there is none.

    warn: called with a line for each newer one that has a manifest and cannot be opened all the same.
    """
    for _, path in reversed(steps(folder)):
        try:
            return Checkpoint.open(path)
        except UserError as error:
            if (path / NAME).exists():
                warn(f"{error}; an earlier one is used")
    return None


def find(path: Path) -> Checkpoint:
    """The checkpoint that a path names: its own folder, or a run, or a run's checkpoints, for the newest one there.

    Raises `UserError` when there is none, and when the newest one is damaged, `DamagedError` that names an older one.
    """
    if not path.is_dir():
        raise UserError(f"no such folder: {path}{near_path(path, folder=True)}")
    if not (path / NAME).exists():
        for folder in (path, path / "checkpoints"):
            if found := steps(folder):
                whole = [step for _, step in found if (step / NAME).exists()]
                if not whole:
                    raise UserError(f"{folder} holds no whole checkpoint")
                path = whole[-1]
                break
    try:
        return Checkpoint.open(path)
    except DamagedError as error:
        raise with_older(error, path) from None


def unfinished(folder: Path) -> list[Path]:
    """Checkpoints beside one that are newer and have no manifest: their saves were cut off."""
    step = _STEP.fullmatch(folder.name)
    return [
        path for number, path in steps(folder.parent) if step and number > int(step[1]) and not (path / NAME).exists()
    ]


@contextmanager
def new_folder(folder: Path, clear: bool = False) -> Iterator[None]:
    """A folder for a new checkpoint, which no other process writes meanwhile. What a writer that was killed left there
    is removed. clear: remove the folder on an error if it was made here. Raises `UserError` when it holds anything
    else, or is in use."""
    used = f"{folder} is not empty; nothing was overwritten: choose another folder"
    if folder.exists() and not folder.is_dir():
        raise UserError(used)
    with os_errors(f"write to {folder}"):
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with os_errors(f"write to {folder}"), _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            left = list(folder.iterdir())
            if not all(PART_NAME.fullmatch(path.name) or path.name == f"{NAME}.partial" for path in left):
                raise UserError(used)
            for path in left:
                path.unlink()
            yield
    except BaseException as error:
        if new and clear:
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, BlockingIOError):
            raise UserError(f"{folder} is being written by another process: choose another folder") from None
        raise


def with_older(error: DamagedError, damaged: Path) -> DamagedError:
    """The error, with the command that resumes the newest checkpoint before `damaged`, if there is one.

    The new run needs a directory of its own where `damaged` still opens, since it then counts as the run's newest.
    """
    step = _STEP.fullmatch(damaged.name)
    for number, path in reversed(steps(damaged.parent)):
        if step and number < int(step[1]) and _opens(path):
            elsewhere = " --out NEW_RUN" if _opens(damaged) else ""
            command = f"shardwise train --resume {shlex.quote(str(path))}{elsewhere}"
            return DamagedError(f"{error}; the checkpoint before it is there: {command}")
    return error


def _opens(path: Path) -> bool:
    return _opened(path) is not None


def _opened(path: Path) -> Checkpoint | None:
    try:
        return Checkpoint.open(path)
    except UserError:
        return None


def keep_last(folder: Path, count: int, known: set[Path] | None = None) -> list[Path]:
    """Remove all whole checkpoints but the `count` newest, and what saves that were cut off left behind before the
    newest whole one. Those that are not finite do not count, and are removed as old as they are. Returns what was
    removed.

    A folder with a manifest that cannot be opened is left for a person to look at. known: those that are whole and
    finite, which are not opened again; it is kept up to date. Raises `UserError` when `count` is below 1, and when a
    folder cannot be removed.
    """
    known = set() if known is None else known
    if count < 1:
        raise UserError(f"at least 1 checkpoint must be kept, not {count}")
    whole, partial = list[Path](), list[Path]()
    for _, path in steps(folder):
        if path not in known and (checkpoint := _opened(path)) and not checkpoint.manifest.nonfinite:
            known.add(path)
        if path in known or checkpoint:
            whole.append(path)
            # Those after the newest whole one may be being written right now.
            abandoned = list(partial)
        elif not (path / NAME).exists():
            partial.append(path)
    counted = [path for path in whole if path in known] or whole
    old = whole[: whole.index(counted[-count:][0])] if whole else []
    removed = [path for path in ([*old, *abandoned] if whole else []) if _remove(path)]
    known.difference_update(removed)
    return removed


def remove_unfinished(folder: Path) -> list[Path]:
    """Remove what saves that were cut off left behind before the newest checkpoint that has a manifest.

    Returns what was removed. Raises `UserError` when a folder cannot be removed.
    """
    found = [path for _, path in steps(folder)]
    whole = [(path / NAME).exists() for path in found]
    newest = len(whole) - whole[::-1].index(True) if any(whole) else 0
    return [path for path, finished in zip(found[:newest], whole, strict=False) if not finished and _remove(path)]


def _remove(path: Path) -> bool:
    """Remove a checkpoint, unless another run resumes from it. Returns whether it is gone.

    The manifest goes first: after a kill, the remaining files are no checkpoint.
    """
    with os_errors(f"remove {path}"):
        try:
            with _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
                if (path / NAME).exists():
                    (path / NAME).unlink()
                    sync_folder(path)
                shutil.rmtree(path)
        except BlockingIOError:
            return False
    return True


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Keep `keep_last`, in any process of this host, from removing the checkpoint in `path` while it is read.

    Does nothing where there is no checkpoint, or the file system has no locks.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(_locked(path, fcntl.LOCK_SH))
        yield


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """flock(2) on a folder, which the kernel releases when this process ends. Raises `BlockingIOError`."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, how)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


def set_aside(path: Path) -> Path | None:
    """Rename a damaged checkpoint, so that the one before it counts and `keep_last` does not remove it. Returns its new
    path; None when it cannot be renamed."""
    numbered = (f"{path.name}.damaged-{number}" for number in itertools.count(2))
    places = map(path.with_name, itertools.chain([f"{path.name}.damaged"], numbered))
    try:
        return path.rename(next(place for place in places if not place.exists()))
    except OSError:
        return None
