"""One rank of a training: `python -m shardwise.runtime.job.worker CONFIG.json` trains, or says why it cannot.

torch is imported only after the process is bound to its launcher's life.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.report.run_directory import ERRORS
from shardwise.runtime.job import pulse, rank
from shardwise.runtime.job.output import say, tolerant_output
from shardwise.runtime.job.rank import leave

if TYPE_CHECKING:
    from shardwise.runtime.job.config import TrainConfig


def main(argv: list[str]) -> int:
    """Train as the rank that the environment names. Returns the exit code."""
    rank.bind()

    def read() -> TrainConfig:
        from shardwise.runtime.job.config import TrainConfig

        return rank.read_file(argv, TrainConfig.read)

    return guarded(read)


def guarded(configuration: Callable[[], TrainConfig]) -> int:
    """Train what `configuration` returns; its directory keeps the traceback of what fails. Returns the exit code."""
    out: Path | None = None

    def work() -> None:
        nonlocal out
        config = configuration()
        out = Path(config.out)

        from shardwise.runtime.job.stop import Stopped
        from shardwise.runtime.job.trainer import train

        try:
            train(config)
        except Stopped as stopped:
            if rank.number() == 0 and not pulse.watched():  # the launcher says it once all have ended
                say(f"shardwise: {stopped}")

    def lost(reason: str) -> None:
        where = f"; its steps are in {out / 'events.jsonl'}" if out else ""
        say(f"shardwise: warning: standard output cannot be written ({reason}): the run continues{where}")

    with tolerant_output(lost):
        return rank.guarded(work, lambda: _keep_traceback(out))


def _keep_traceback(out: Path | None) -> None:
    if out is None:
        return
    # A run directory that cannot be written must not hide the failure that is being reported.
    with suppress(OSError):
        (out / ERRORS).mkdir(parents=True, exist_ok=True)
        (out / ERRORS / f"rank-{rank.number()}.txt").write_text(traceback.format_exc())


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
