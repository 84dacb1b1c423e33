"""Table of `--links`: communication of a step by axis, and its time on each kind of link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.report.terminal import Column, FittedTable, Renderable
from shardwise.report.units import format_bytes, format_share, format_time

if TYPE_CHECKING:
    from shardwise.predict.time.link_use import LinkUse


def link_tables(uses: Sequence[LinkUse], step: float) -> Iterator[Renderable]:
    """One table per rank role, and advice per axis. step: seconds of the whole step."""
    from shardwise.predict.time.link_use import link_advice

    for role in dict.fromkeys(use.role for use in uses):
        columns = (
            Column("axis", left=True), Column("ranks"), Column("placed on", left=True), Column("calls"),
            Column("payload"), Column("as placed"), Column("share"), Column("in a node"), Column("between"),
        )  # fmt: skip
        table = FittedTable(columns, title=f"communication of one step by axis, {role}, nothing overlapped")
        for use in uses:
            if use.role == role:
                times = ("-" if seconds is None else format_time(seconds) for seconds in (use.inside, use.between))
                table.add_row(
                    use.axis, str(use.ranks), use.link, f"{use.calls:,}", format_bytes(use.payload_bytes),
                    format_time(use.seconds), format_share(use.seconds / step), *times,
                )  # fmt: skip
        yield table
    if uses:
        yield f"shares are of a step of {format_time(step)}; overlapped calls cost less than their share"
    yield from link_advice(uses, step)
