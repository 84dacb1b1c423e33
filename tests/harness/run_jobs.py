"""Whole runs, started from a process of their own."""

from __future__ import annotations

import os
from typing import Any

from shardwise import api
from shardwise.errors import UserError
from shardwise.runtime.config import TrainConfig
from shardwise.runtime.job.launch import RunFailed

Ended = tuple[api.TrainResult | None, BaseException | None, list[str]]


def train(config: TrainConfig, command: list[str], options: dict[str, Any]) -> Ended:
    """(result, or what it failed with, what it said on the way) of a run whose ranks are started with `command`."""
    lines: list[str] = []
    with open(os.devnull, "w") as null:
        try:
            result = api.run(config, progress=lines.append, rank0_stdout=null.fileno(), worker=command, **options)
            return result, None, lines
        except (UserError, RunFailed) as failed:
            return None, failed, lines
