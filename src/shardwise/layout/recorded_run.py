"""Workers of a run on disk: the records of its servers, or its rounds under `sync=local`."""

from dataclasses import dataclass
from typing import Any

from shardwise.errors import UserError
from shardwise.layout.layout import Layout
from shardwise.report.run_directory import RunDirectory
from shardwise.report.step_report import StepReport
from shardwise.schedule.outer_rounds import OuterRound, outer_rounds
from shardwise.schedule.traffic import WorkerTraffic, run_traffic
from shardwise.schedule.update_record import UpdateRecord, read_records


@dataclass(frozen=True)
class RecordedRun:
    """What a run has recorded of its workers."""

    layout: Layout
    records: tuple[UpdateRecord, ...]
    """Of each server, of the run's last start; none without parameter servers."""
    rounds: tuple[OuterRound, ...]
    """Of rank 0's replica; none without `sync=local`."""
    traffic: tuple[WorkerTraffic, ...]
    """Messages of the whole run; none without a step report, which `train --report` writes."""

    def to_json(self) -> dict[str, Any]:
        servers = [{"server": server, **record.summary()} for server, record in enumerate(self.records)]
        return {"servers": servers, "traffic": [one._asdict() for one in self.traffic]}


def recorded_run(run: RunDirectory) -> RecordedRun:
    """Read a run. Raises `UserError` when it is damaged."""
    config = run.run.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("layout"), str):
        raise UserError(f"{run.path / 'run.json'} names no layout")
    layout = Layout.parse(config["layout"])
    records = tuple(read_records(run.updates())) if layout.served else ()
    rounds = tuple(outer_rounds(event for _, event in run.events())) if layout.local_sgd else ()
    file = next((run.report(name) for name in ("measured", "predicted") if run.report(name).is_file()), None)
    traffic = run_traffic(StepReport.read(file), records, layout.tp) if file and records else ()
    return RecordedRun(layout, records, rounds, tuple(traffic))
