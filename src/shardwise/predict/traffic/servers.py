"""Messages of a worker's rank to and from parameter servers in one step."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.layout.axes import SERVER
from shardwise.layout.key_ranges import elements, key_ranges
from shardwise.layout.units import UnitPlan
from shardwise.report.step_report import LedgerRow


def server_rows(plan: UnitPlan) -> Iterator[LedgerRow]:
    """One gradient pushed to each server, and its new weights pulled. Source: Li et al. 2014."""
    for server, segments in enumerate(key_ranges(plan) if plan.layout.parameter_servers.count else ()):
        for op, dtype in (("push", plan.grad_dtype), ("pull", plan.layout.dtype)):
            yield LedgerRow("optimizer", op, SERVER, f"server {server}", dtype, elements(segments), 1)
