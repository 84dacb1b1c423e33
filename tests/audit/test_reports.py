"""Public reports of hangs and of too much memory, rebuilt small: the first line names the cause."""

from __future__ import annotations

import pytest

from harness.reported_programs import REPORTS
from harness.today import some_of
from shardwise.audit.result import audit_lines, audit_of


@pytest.mark.parametrize("url", some_of(REPORTS, 4, "reports"))
def test_the_first_line_names_the_cause(url, audits, tmp_path) -> None:
    report = REPORTS[url]
    audit = audit_of(audits.audit(report.program, tmp_path), "train.py")
    first = str(next(iter(audit_lines(audit))))
    assert report.words in first and audit.exit_code, (tmp_path / "log").read_text()
    for line in report.program.lines:
        assert f"train.py:{line}" in first
    if report.rank is not None:
        assert audit.difference is not None and audit.difference.sure and audit.difference.ranks == (report.rank,)
