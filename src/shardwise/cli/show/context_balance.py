"""The balance of attention's work over context-parallel ranks, as it is printed."""

from __future__ import annotations

from shardwise.report import StepReport


def balance_lines(report: StepReport) -> list[str]:
    """The work of the busiest rank over the mean, beside a plain cut's; nothing without context parallelism."""
    if report.balance is None:
        return []
    here, plain = report.balance["largest_over_mean"], report.balance["plain_largest_over_mean"]
    cut = "zigzag" if report.balance["zigzag"] else "heads"
    return [f"attention, busiest rank over the mean: {here:.3f} ({cut}), {plain:.3f} in a plain cut\n"]
