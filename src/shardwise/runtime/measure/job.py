"""Ranks that measure something and leave it in a file: from a job's words to what they wrote. Imports no torch."""

import json
import sys
from collections.abc import Callable
from typing import Any

from shardwise.runtime.job.launch import RunFailed, supervise
from shardwise.runtime.job.locks import temporary_folder

PATIENCE = 5.0
"""Seconds that ranks get to end after a signal."""


def measured(
    module: str, job: Callable[[str], Any], ranks: int, *, threads: int = 1
) -> tuple[Any, BaseException | None]:
    """(what `python -m module JOB.json` on so many ranks left, how that ended if not well).

    job: from the file in which rank 0 is to leave its JSON to the job's own JSON. Raises how it ended where nothing was
    left: `UserError`, `RunFailed` or `KeyboardInterrupt`.
    """
    with temporary_folder() as folder:
        out, file = folder / "result.json", folder / "job.json"
        file.write_text(json.dumps(job(str(out))))
        ending = supervise([sys.executable, "-m", module, str(file)], ranks, threads=threads, patience=PATIENCE)
        failure = ending.error()
        if not out.exists():
            raise failure or RunFailed("the ranks measured nothing")
        return json.loads(out.read_text()), failure


def whole(module: str, job: Callable[[str], Any], ranks: int, *, threads: int = 1) -> Any:
    """As above, and raise unless all ranks end orderly."""
    measurement, failure = measured(module, job, ranks, threads=threads)
    if failure is not None:
        raise failure
    return measurement
