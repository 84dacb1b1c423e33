"""Table of `--links`: communication of a step by axis, and its time on each kind of link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_time

if TYPE_CHECKING:
    from shardwise.predict.time.link_use import LinkUse


def link_tables(uses: Sequence[LinkUse], step: float) -> Iterator[Renderable]:
    """One table per rank role, and advice per axis. step: seconds of the whole step."""
    from shardwise.predict.time.link_use import link_advice

    for role in dict.fromkeys(use.role for use in uses):
        columns = (
            Column("axis", left=True), Column("ranks", drop=3), Column("placed on", left=True, wraps=True, least=0),
            Column("calls", drop=5), Column("payload", "bytes", drop=2), Column("as placed", "seconds"),
            Column("share", "share"), Column("in a node", "seconds", drop=1), Column("between", "seconds", drop=1),
        )  # fmt: skip
        table = FittedTable(columns, title=f"communication of one step by axis, {role}, nothing overlapped")
        for use in uses:
            if use.role == role:
                alone = ("-" if seconds is None else seconds for seconds in (use.inside, use.between))
                times = use.seconds, use.seconds / step, *alone
                table.add_row(use.axis, use.ranks, use.link, use.calls, use.payload_bytes, *times)
        yield table
    if uses:
        yield f"shares are of a step of {format_time(step)}; overlapped calls cost less than their share"
    yield from link_advice(uses, step)
