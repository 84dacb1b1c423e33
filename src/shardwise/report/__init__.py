"""What a step holds and moves, however it was found out, and every way to look at it.

`StepReport` and `compare` are the core; tables, HTML, figures, traces and the run directory stand on them.
"""

from shardwise.report.compare import Comparison, compare
from shardwise.report.run_directory import RunDirectory
from shardwise.report.step_report import Bytes, LedgerRow, Role, StepReport, TransportRow

__all__ = ["Bytes", "Comparison", "LedgerRow", "Role", "RunDirectory", "StepReport", "TransportRow", "compare"]
