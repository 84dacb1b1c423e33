"""What every test run prints besides its results: the seed of the sampled layouts, and measurements side by side."""

from __future__ import annotations

import os
from typing import Any

from harness import summary


def pytest_report_header() -> str:
    from harness.space import all_cases, seed

    if os.environ.get("SHARDWISE_ALL") == "1":
        return f"layouts: all {len(all_cases())} generated cases (SHARDWISE_ALL=1)"
    return f"layouts: a sample of {len(all_cases())} cases, SHARDWISE_SEED={seed()}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for title, lines in summary.sections():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
