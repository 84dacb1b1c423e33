"""Whole runs, started from a process of their own."""

import os
from typing import Any

from shardwise import api
from shardwise.errors import DivergedError, UserError
from shardwise.runtime.job.config import LaunchConfig, TrainConfig
from shardwise.runtime.job.launch import RunFailed

Ended = tuple[api.TrainResult | None, BaseException | None, list[str]]


def train(config: TrainConfig, command: list[str], options: dict[str, Any]) -> Ended:
    """(result, or what it failed with, what it said on the way) of a run whose ranks are started with `command`.

    unread, an option: rank 0 writes into a pipe whose reader has left.
    """
    lines: list[str] = []
    with open(_unread() if options.pop("unread", False) else os.devnull, "w") as output:
        try:
            launch = LaunchConfig(progress=lines.append, rank0_stdout=output.fileno(), worker=command, **options)
            return api.run(config, launch), None, lines
        except (UserError, DivergedError, RunFailed) as failed:
            return None, failed, lines


def _unread() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing
