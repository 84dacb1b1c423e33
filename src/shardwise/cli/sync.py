"""Workers of a run or of a layout, and the servers, outer steps or all-reduces in which they agree.

LAYOUT is a layout such as dp=4,sync=ssp,staleness=2. What a run has recorded: docs/servers.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.cli.declare import CommandOptions, arg, word
from shardwise.cli.output import print_result
from shardwise.layout import Layout
from shardwise.records import dataclass
from shardwise.report.run_directory import RunDirectory
from shardwise.schedule.pipeline.times import seconds_of
from shardwise.schedule.stragglers import Stragglers
from shardwise.schedule.update_record import UpdateRecord


@dataclass
class ShowUpdates(CommandOptions):
    """Who read which weights and who waited for whom in a run."""

    run_directory: Path = word("a run directory", "RUN")

    def run(self) -> int:
        """Print what a run has recorded of its workers."""
        from shardwise.cli.show.sync_table import sync_tables
        from shardwise.layout.recorded_run import recorded_run

        recorded = recorded_run(RunDirectory.open(self.run_directory))
        data: dict[str, Any] = {"run": str(self.run_directory), "layout": str(recorded.layout)}
        data |= {"servers": [_json(record) for record in recorded.records]}
        data |= {
            "rounds": [one._asdict() for one in recorded.rounds],
            "traffic": [one._asdict() for one in recorded.traffic],
        }
        return print_result(self, data, sync_tables(recorded.layout, recorded.records, recorded))


@dataclass
class SimulateUpdates(CommandOptions):
    """The workers of a layout in virtual time, with slow ranks."""

    layout: str = word("such as dp=4,sync=ssp,staleness=2", "LAYOUT")
    steps: int = arg("of the run", "N", 24)
    gradient: str = arg("of one gradient, exchange included", "TIME", "100ms")
    slow: tuple[str, ...] = arg(
        "a slow rank: rank=1,factor=3[,probability=P], or rank=all,spread=0.3; once for each", "TEXT", ()
    )
    seed: int = arg("of slow steps (0)", "N", 0, shown="")

    def run(self) -> int:
        """Print the record of a layout's workers in virtual time."""
        from shardwise.cli.show.sync_table import sync_tables
        from shardwise.layout.virtual_run import virtual_run

        layout = Layout.parse(self.layout)
        stragglers = Stragglers.parse(self.slow, self.seed)
        record = virtual_run(layout, self.steps, seconds_of(self.gradient), stragglers)
        about = {"layout": str(layout), "steps": self.steps, "slow": str(stragglers), "seed": self.seed}
        data = {**about, "seconds": record.seconds, "servers": [_json(record)]}
        lines = [f"{layout}, {self.steps} steps in virtual time; slow: {stragglers}"]
        return print_result(self, data, [*lines, *sync_tables(layout, [record])])


def _json(record: UpdateRecord) -> dict[str, Any]:
    gradients = [{**one._asdict(), "staleness": one.staleness} for one in record.gradients]
    return {**record.summary(), "gradients_listed": gradients, "updated_s": record.updated}


ACTIONS = {"show": ShowUpdates, "simulate": SimulateUpdates}
