"""Memory and traffic of a step, predicted or observed, and every way to show them.

`StepReport` and `compare` are the core; tables, HTML, figures, traces and the run directory stand on them.
"""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.report.compare import ReportComparison, compare
    from shardwise.report.run_directory import RunDirectory
    from shardwise.report.step_report import Bytes, LedgerRow, Role, StepReport, TransportRow

__all__ = ["Bytes", "LedgerRow", "ReportComparison", "Role", "RunDirectory", "StepReport", "TransportRow", "compare"]

lazily(__name__)
