"""Trainings whose ranks may use no more than so much memory: `python memory_limit.py LAYOUT MB OUT TEXT`.

A control group holds them where the machine lets one be made, and ends ranks that need more. Elsewhere they are left
alone, and the most that a rank has used is compared with the limit afterwards. Prints a line of JSON.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise import api
from shardwise.layout import Workload
from shardwise.model import ModelConfig
from shardwise.runtime.job.config import WORKER, LaunchConfig
from shardwise.runtime.job.launch import RunFailed

GROUPS = Path("/sys/fs/cgroup/memory")
MODEL = ModelConfig("limited", vocab=300, hidden=512, layers=10, heads=8, kv_heads=8, ffn=1408, max_positions=64)


@contextmanager
def limited(mb: int) -> Iterator[Path | None]:
    """A control group with so much memory; None where none can be made."""
    group = GROUPS / f"shardwise-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(mb << 20))
    except OSError:
        yield None
        return
    yield group
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def main(layout: str, mb: int, out: str, text: str) -> None:
    with limited(mb) as group:
        worker = list(WORKER)
        if group is not None:
            worker = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"', *WORKER]
        config = api.configure(
            MODEL, layout, Workload(seq=16, batch=2), text, 3, out, validate_batches=1, tensorboard=False
        )
        launch = LaunchConfig(worker=worker, progress=lambda line: None, rank0_stdout=2)
        try:
            losses, error = api.run(config, launch).losses, ""
        except RunFailed as failed:
            losses, error = [], str(failed)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
        if group is not None:
            peak = int((group / "memory.max_usage_in_bytes").read_text())
    print(json.dumps({"losses": losses, "error": error, "peak": peak, "grouped": group is not None}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
