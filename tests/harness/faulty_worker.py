"""A rank that gets into trouble on purpose: `python faulty_worker.py FAULT CONFIG.json`, a worker for the launcher.

FAULT is JSON: what goes wrong ("hang", "freeze", "raise", "kill", "file limit"), on which rank, at which step (from 1),
where ("forward", "backward", "optimizer", "save", "data"), and `once`, a file: what is in it has happened already, and
is not done again after a restart. The program itself knows nothing of this.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(fault: dict[str, Any], argv: list[str]) -> int:
    from shardwise.decoder import attention
    from shardwise.runtime import batches, checkpointing, engine, optimizer, pulse, worker

    if int(os.environ["RANK"]) == fault["rank"]:
        if fault["what"] == "file limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault["bytes"], fault["bytes"]))
        else:
            now = [0]
            _before(pulse.Pulse, "step", lambda self, number: now.__setitem__(0, number))
            owner, name = {
                "data": (batches.Batches, "step"),
                "forward": (attention.Attention, "forward"),
                "backward": (engine.Engine, "finish_backward"),
                "optimizer": (optimizer.Optimizer, "_update"),
                "save": (checkpointing, "write_part"),
            }[fault["where"]]

            def trouble(*args: Any) -> None:
                if now[0] == fault["step"] and not Path(fault["once"]).exists():
                    Path(fault["once"]).write_text(str(time.time()))
                    _TROUBLES[fault["what"]]()

            _before(owner, name, trouble)
    return worker.main(argv)


def _before(owner: Any, name: str, act: Callable[..., object]) -> None:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def _raise() -> None:
    raise ZeroDivisionError("on purpose")


_TROUBLES: dict[str, Callable[[], object]] = {
    "hang": lambda: time.sleep(3600),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": _raise,
}


if __name__ == "__main__":
    from shardwise.runtime.worker import leave

    leave(main(json.loads(sys.argv[1]), sys.argv[2:]))
