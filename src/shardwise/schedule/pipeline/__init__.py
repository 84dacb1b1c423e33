"""Pipelines as data: for each rank a list of actions, which is verified, timed, drawn and executed.

`build` makes one of the schedules of `generators()`; `verify`, `simulate` and `peaks` say whether it is right, what it
takes and what it holds; `to_text` and `to_csv` write it, the latter as torch.distributed.pipelining does. `Action` says
what an executor does for each action. `docs/pipelines.md` explains it.
"""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.schedule.pipeline.action import Action, parse_action
    from shardwise.schedule.pipeline.completion import complete
    from shardwise.schedule.pipeline.plan import PipelineSchedule
    from shardwise.schedule.pipeline.registry import ScheduleGenerator, build, find, generators

__all__ = [
    "Action",
    "PipelineSchedule",
    "ScheduleGenerator",
    "build",
    "complete",
    "find",
    "generators",
    "parse_action",
]

lazily(__name__)
