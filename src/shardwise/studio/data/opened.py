"""A file that was dropped on the page: a step report, a certificate of an engine, or a Chrome trace."""

import json
from typing import Any

from shardwise.errors import UserError
from shardwise.report.compare import compare
from shardwise.report.exposure import spans
from shardwise.report.palette import classes_of
from shardwise.report.step_report import StepReport
from shardwise.report.verdict import verdict
from shardwise.studio.columns import How, Table, View
from shardwise.studio.data import timelines
from shardwise.studio.data.run_time import step_figures, time_figures
from shardwise.studio.data.runs import ledger_table, memory_table


def opened(content: bytes) -> View:
    """The file's timeline, and a report's bytes and ledger. Raises `UserError` for any other file."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError("this file is no JSON: drop a step report, a certificate or a Chrome trace") from None
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
    if isinstance(data, dict) and {"engine", "rows", "findings"} <= data.keys():
        try:
            return _certificate(data)
        except (LookupError, TypeError, AttributeError) as error:
            raise UserError(f"this certificate is damaged ({type(error).__name__}: {error}): make it again") from None
    timeline = timelines.of_trace(data)
    how = How(
        [f"Read from the file: a Chrome trace of {len(timeline.events):,} events on {len(timeline.rows)} threads."]
    )
    more = {"kind": "trace", "title": "trace", "timeline": timeline.to_json()}
    return View({}, {}, {"timeline": timeline.table()}, {"timeline": how}, more)


def _certificate(data: dict[str, Any]) -> View:
    """What `certify --json` has written: a row per layout and model with a column per property, and what is wrong,
    with the text of a program that shows it."""
    rows, findings = data["rows"], data["findings"]
    names = [name for name in rows[0]["cells"] if any(row["cells"][name]["state"] != "not run" for row in rows)]
    cells = [(row["layout"], row["model"], *(row["cells"][name]["state"] for name in names)) for row in rows]
    tables = {
        "cells": Table.of_rows(
            f"{data['engine']} beside one device", dict.fromkeys(("layout", "model", *names), ""), cells
        )
    }
    units = dict.fromkeys(("property", "model", "smallest layout", "parameter", "error", "kind"), "")
    of_cell = ("parameter", "error", "kind")
    wrong = [
        (one["column"], one["model"], one["layout"], *(one["cell"][name] for name in of_cell)) for one in findings
    ]  # fmt: skip
    how = {"cells": How([", ".join(f"{count} {state}" for state, count in data["counts"].items() if count)])}
    if wrong:
        tables["findings"] = Table.of_rows("What is wrong, where it is smallest", units, wrong)
        how["findings"] = How([line for one in findings for line in one["script"].splitlines()])
    line = f"{data['engine']}: {data['counts']['proven']} cells proven, {data['counts']['wrong']} wrong."
    more = {"kind": "certificate", "title": data["engine"], "timeline": {"rows": []}, "verdict": {"line": line}}
    return View({}, {}, tables, how, more)
