"""Time of a step by part, as lines and a table."""

from collections.abc import Mapping
from typing import Any

from shardwise.report import time_parts
from shardwise.report.step_report import StepReport
from shardwise.report.table import plain_table
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_share, format_time

LEAST = 0.002
"""Share of a step from which a part is shown."""


def step_lines(report: StepReport, tokens: int) -> list[Renderable]:
    """Time of a step by part; nothing where it is not priced. tokens: of a step, over all ranks."""
    if report.timing is None:
        return []
    result = report.timing
    table = plain_table(("part of a step", "time", "share"))
    for name, seconds in sorted(result["parts"].items(), key=lambda part: -part[1]):
        if seconds >= LEAST * result["seconds"]:
            table.add_row(time_parts.STEP[name], format_time(seconds), format_share(seconds / result["seconds"]))
    low, high = format_time(result["low"]), format_time(result["high"])
    return [
        f"a step takes {format_time(result['seconds'])} (80% range {low} to {high}) as {result['engine']} runs it, "
        f"{tokens / result['seconds']:,.0f} tokens/s",
        table,
        *binding(result),
        "",
    ]


def binding(timing: Mapping[str, Any]) -> list[str]:
    """What binds a step that offloads, in one sentence; nothing for other steps. timing: `StepTiming.to_json`."""
    busy: dict[str, float] = timing.get("busy", {})
    if not busy:
        return []
    words = {"device": "the device", "link": "the link to the host", "cores": "the host's cores", "disk": "the disk"}
    first, *others = sorted(busy, key=lambda name: -busy[name])
    rest = ", ".join(f"{words[name].removeprefix('the ')} {format_time(busy[name])}" for name in others if busy[name])
    return [
        f"offloading: {words[first]} bind{'' if first == 'cores' else 's'}, busy for {format_time(busy[first])} of the "
        f"step's {format_time(timing['seconds'])} ({rest})"
    ]
