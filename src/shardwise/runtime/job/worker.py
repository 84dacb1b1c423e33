"""One rank's process: `python -m shardwise.runtime.job.worker CONFIG.json` trains, or says in one line why it cannot.

torch is imported only after the process is bound to its launcher's life.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardwise.errors import UserError
from shardwise.report.run_directory import ERRORS
from shardwise.runtime.job.launch import (
    INTERRUPTED,
    RANK_FAILED,
    USER_MISTAKE,
    Failure,
    die_with_parent,
    lost_a_peer,
    reason,
    say,
)

if TYPE_CHECKING:
    from shardwise.runtime.config import TrainConfig


def main(argv: list[str]) -> int:
    """Train as the rank that the environment names. Returns the exit code."""
    die_with_parent()
    _tell_where_on_request()
    return guarded(lambda: _read(argv))


def _read(argv: list[str]) -> TrainConfig:
    from shardwise.runtime.config import TrainConfig

    if len(argv) != 1:
        raise UserError("usage: python -m shardwise.runtime.job.worker CONFIG.json")
    try:
        return TrainConfig.read(Path(argv[0]))
    except OSError as error:
        raise UserError(f"cannot read {argv[0]}: {error.strerror}") from None


def guarded(configuration: Callable[[], TrainConfig]) -> int:
    """Train what `configuration` returns, and turn whatever fails into an exit code and one line for the launcher."""
    out: Path | None = None
    try:
        config = configuration()
        out = Path(config.out)

        from shardwise.runtime.job.stop import Stopped
        from shardwise.runtime.trainer import train

        try:
            train(config)
        except Stopped as stopped:
            if _rank() == 0:
                say(str(stopped))
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except UserError as error:
        _report(Failure("user", _rank(), None, str(error)))
        return USER_MISTAKE
    except BaseException as error:
        kind: Literal["peer", "error"] = "peer" if lost_a_peer(error) else "error"
        _report(Failure(kind, _rank(), getattr(error, "step", None), _one_line(error)))
        if out is not None:
            _keep_traceback(out)
        return RANK_FAILED


def _tell_where_on_request() -> None:
    """SIGUSR1 writes where every thread stands, even when one holds Python's lock."""
    if path := os.environ.get("SHARDWISE_STACK"):
        # The file must stay open as long as the process lives.
        faulthandler.register(signal.SIGUSR1, file=open(path, "w"), all_threads=True)  # noqa: SIM115


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {reason(error)}" if str(error).strip() else type(error).__name__


def _report(failure: Failure) -> None:
    """To the launcher; under torchrun, which has its own, to standard error."""
    if path := os.environ.get("SHARDWISE_ERROR_FILE"):
        failure.write(Path(path))
    elif failure.kind == "user":
        say(f"shardwise: error: {failure.message}")
    else:
        at = "" if failure.step is None else f" at step {failure.step}"
        say(f"shardwise: error: rank {failure.rank} failed{at}: {failure.message}")


def _keep_traceback(out: Path) -> None:
    # A run directory that cannot be written must not hide the failure that is being reported.
    with suppress(OSError):
        (out / ERRORS).mkdir(parents=True, exist_ok=True)
        (out / ERRORS / f"rank-{_rank()}.txt").write_text(traceback.format_exc())


def leave(code: int) -> None:
    """End the process. After a failure at once: the interpreter's own way out can wait for a lost peer forever."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit(0)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
