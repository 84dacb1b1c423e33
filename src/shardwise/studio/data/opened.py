"""A file that was dropped on the page: a step report, or a Chrome trace."""

import json

from shardwise.errors import UserError
from shardwise.report.compare import compare
from shardwise.report.exposure import spans
from shardwise.report.palette import classes_of
from shardwise.report.step_report import StepReport
from shardwise.report.verdict import verdict
from shardwise.studio.columns import How, View
from shardwise.studio.data import timelines
from shardwise.studio.data.run_time import step_figures, time_figures
from shardwise.studio.data.runs import ledger_table, memory_table


def opened(content: bytes) -> View:
    """The file's timeline, and a report's bytes and ledger. Raises `UserError` for any other file."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError("this file is no JSON: drop a step report or a Chrome trace") from None
    if isinstance(data, dict) and "schema_version" in data:
        report = StepReport.from_json(data)
        timeline = timelines.of_report(report)
        both = compare(report, report)
        figures = time_figures(report)
        recording = {min(role.ranks): spans(role) for role in report.roles if role.timeline}
        by_rank = step_figures(verdict(recording), recording)
        tables = {"timeline": timeline.table(), "memory": memory_table(both), "ledger": ledger_table(both)}
        tables |= figures.tables | (by_rank.tables if recording else {})
        how = How(
            [f"Read from the file: a {report.source} step of {report.layout} on {report.cluster}.", *report.notes]
        )
        more = {"kind": "report", "title": f"{report.source} step, {report.layout}", "timeline": timeline.to_json()}
        more |= {"classes": list(classes_of(role.bytes for role in report.roles)), "bars": figures.bars | by_rank.bars}
        return View({}, {}, tables, dict.fromkeys(tables, how), more)
    timeline = timelines.of_trace(data)
    how = How(
        [f"Read from the file: a Chrome trace of {len(timeline.events):,} events on {len(timeline.rows)} threads."]
    )
    more = {"kind": "trace", "title": "trace", "timeline": timeline.to_json()}
    return View({}, {}, {"timeline": timeline.table()}, {"timeline": how}, more)
