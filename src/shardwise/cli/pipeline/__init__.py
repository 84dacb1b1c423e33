"""Pipeline schedules: draw them, prove them right, simulate their time and memory, run them.

SCHEDULE is a name such as 1f1b; `shardwise list schedules` shows all of them. --ranks is the number of pipeline
ranks, --micro that of micro-batches, --virtual that of chunks of the model on each rank.
"""

from __future__ import annotations

import argparse

from shardwise.cli.actions import actions
from shardwise.cli.pipeline import bubbles, running, showing, simulating, verifying

ACTIONS = {
    "show": (showing, "what each rank does, drawn over time and as lists; or written to a file"),
    "verify": (verifying, "prove schedules right; the exit code is 1 where one is wrong"),
    "simulate": (simulating, "a schedule in time: makespan, bubbles, what each rank holds, its timeline"),
    "bubble": (bubbles, "bubbles against the number of micro-batches, and the least number for a wanted bubble"),
    "run": (running, "run schedules on processes of this host, with a timed wait in place of arithmetic"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = actions(parser)
    for name, (module, text) in ACTIONS.items():
        module.add_arguments(action(name, text, module.run))
