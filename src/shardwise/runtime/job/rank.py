"""One rank's process, whatever it is there for: bound to its launcher, it says in one line why it fails.

A program of ranks, which `supervise` starts, is a module that ends with

    if __name__ == "__main__":
        leave(main(sys.argv[1:], Job.read, run), at_once=True)

where `run(rank, job)` finds the default group made. Training (`worker.py`) meets in a way of its own and shares the
rest. Imports no torch.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from shardwise.codec import Json
from shardwise.errors import DivergedError, UserError, file_limit, os_errors
from shardwise.report.files import write_whole
from shardwise.runtime.job import launch
from shardwise.runtime.job.output import say

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class RankJob(Json):
    """Job of the ranks, as their file describes it. timeout: seconds that a rank waits for others. out: file for what
    they find."""

    timeout: float
    out: str

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.from_json(json.loads(path.read_text()))

    def leave(self, result: Any) -> None:
        """Write what was found to `out`, whole or not at all."""
        write_whole(Path(self.out), json.dumps(result))


T = TypeVar("T")
J = TypeVar("J", bound=RankJob)


def main(argv: list[str], read: Callable[[Path], J], run: Callable[[int, J], object]) -> int:
    """Be the rank that the launcher's environment names: `run(rank, job)` inside a gloo group of all ranks.

    argv: one word, the file that `read` makes the job of. Returns the exit code; `guarded` has told the launcher why it
    is not 0. The group remains: leave at once.
    """
    bind()

    def work() -> None:
        job = read_file(argv, read)
        run(join(job.timeout), job)

    return guarded(work)


def bind() -> None:
    """Die with the launcher, and have SIGUSR1 write where every thread stands, even when one holds Python's lock."""
    launch.die_with_parent()
    if path := os.environ.get("SHARDWISE_STACK"):
        # The file must stay open as long as the process lives.
        faulthandler.register(signal.SIGUSR1, file=open(path, "w"), all_threads=True)  # noqa: SIM115


def read_file(argv: list[str], read: Callable[[Path], T]) -> T:
    """Result of `read` for the file that is the only word of `argv`. Raises `UserError` when there is none."""
    if len(argv) != 1:
        raise UserError("a rank takes one argument, the file that says what it is to do")
    with os_errors(f"read {argv[0]}"):
        return read(Path(argv[0]))


def join(timeout: float, gpu: torch.device | None = None, store: dist.Store | None = None) -> int:
    """Meet the other ranks in a gloo group, with as many threads as the launcher allows, or with `gpu` in one of NCCL.
    Returns this rank's number.

    timeout: seconds that a rank waits for others. gpu: this rank's. store: where they meet, in place of the launcher's.
    """
    import torch
    import torch.distributed as dist

    from shardwise.runtime.allocator import retain_freed_memory

    retain_freed_memory()  # as the trainer does
    if gpu is None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank = number()
    dist.init_process_group(
        "gloo" if gpu is None else "nccl",
        init_method=os.environ["SHARDWISE_RENDEZVOUS"] if store is None else None,
        store=store,
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout),
        device_id=gpu,
    )
    return rank


def guarded(work: Callable[[], object], keep: Callable[[], object] = lambda: None) -> int:
    """Do `work`, and turn whatever fails into an exit code and one line for the launcher, or torchrun's user.

    keep: called while an exception that is no user's mistake is being handled, after the line is out.
    """
    try:
        work()
        return 0
    except KeyboardInterrupt:
        return launch.INTERRUPTED
    except UserError as error:
        _report(launch.Failure("user", number(), None, str(error)))
        return launch.USER_MISTAKE
    except DivergedError as error:
        _report(launch.Failure("diverged", number(), None, str(error)))
        return launch.DIVERGED
    except BaseException as error:
        if line := file_limit(error):
            _report(launch.Failure("user", number(), None, line))
            return launch.USER_MISTAKE
        kind: Literal["peer", "error"] = "peer" if launch.lost_a_peer(error) else "error"
        name = type(error).__name__
        line = f"{name}: {launch.reason(error)}" if str(error).strip() else name
        _report(launch.Failure(kind, number(), getattr(error, "step", None), line))
        keep()
        return launch.RANK_FAILED


def leave(code: int, *, at_once: bool = False) -> None:
    """End the process. After a failure at once: the interpreter's own way out can wait for a lost peer forever.

    at_once: after a success, too. Taking gloo down while peers do so now and then aborts the process.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # without a reader, or closed
            stream.flush()
    if code or at_once:
        os._exit(code)
    sys.exit(0)


def number() -> int:
    return int(os.environ.get("RANK", "0"))


def local_number() -> int:
    return int(os.environ.get("LOCAL_RANK", number()))


def _report(failure: launch.Failure) -> None:
    """To the launcher; under torchrun, which has its own, to standard error."""
    if path := os.environ.get("SHARDWISE_ERROR_FILE"):
        failure.write(Path(path))
    elif failure.kind == "user" or (failure.kind == "diverged" and not failure.rank):
        say(f"shardwise: error: {failure.message}")
    elif failure.kind == "diverged":
        pass  # rank 0 says it for all
    else:
        at = "" if failure.step is None else f" at step {failure.step}"
        say(f"shardwise: error: rank {failure.rank} failed{at}: {failure.message}")
