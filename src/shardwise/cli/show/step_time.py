"""The predicted time of a step, as it is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardwise.cluster import Cluster
    from shardwise.report import StepReport

LEAST = 0.002
"""Share of a step from which a part is shown."""


def timing_lines(report: StepReport, cluster: Cluster | None, tokens: int) -> list[RenderableType]:
    """What a step takes and where its time goes; for an unmeasured CPU, how to measure it. tokens: of a step,
    over all ranks."""
    from rich.table import Table

    from shardwise.report import time_parts
    from shardwise.report.units import format_share, format_time

    if report.timing is None:
        unmeasured = cluster is not None and cluster.device.kind == "cpu" and not cluster.device.measured
        hint = "no time of a step: measure this machine with `shardwise calibrate device --ranks N --out FILE.toml`"
        return [f"{hint} and name it with --cluster"] if unmeasured else []
    result = report.timing
    table = Table("part of a step", "time", "share", box=None, pad_edge=False)
    for name, seconds in sorted(result["parts"].items(), key=lambda part: -part[1]):
        if seconds >= LEAST * result["seconds"]:
            table.add_row(time_parts.STEP[name], format_time(seconds), format_share(seconds / result["seconds"]))
    low, high = format_time(result["low"]), format_time(result["high"])
    return [
        f"a step takes {format_time(result['seconds'])} (80% range {low} to {high}) as {result['engine']} runs it, "
        f"{tokens / result['seconds']:,.0f} tokens/s",
        table,
        "",
    ]
