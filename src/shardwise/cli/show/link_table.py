"""Table of `--links`: communication of a step by axis, and its time on each kind of link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_share, format_time

if TYPE_CHECKING:
    from shardwise.predict.time.link_use import LinkUse

LEAST = 1e-4
"""Share of a step below which an axis is not listed."""
ALIKE = 0.02
"""Share by which the communication of rank roles may differ for one table to show both."""


def link_tables(uses: Sequence[LinkUse], step: float) -> Iterator[Renderable]:
    """One table for the rank roles that communicate longest, one per role that differs, and advice per axis. step:
    seconds of the whole step."""
    from shardwise.predict.time.link_use import link_advice

    roles: dict[str, list[LinkUse]] = {}
    for use in uses:
        roles.setdefault(use.role, []).append(use)
    left = sorted(roles, key=lambda role: -_seconds(roles[role]))
    while left:
        first, *others = left
        same = [role for role in others if _alike(roles[first], roles[role])]
        left = [role for role in others if role not in same]
        yield _table(roles[first], [first, *same], step)
    if uses:
        yield f"shares are of a step of {format_time(step)}; overlapped calls cost less than their share"
    yield from link_advice(uses, step)


def _table(uses: Sequence[LinkUse], roles: Sequence[str], step: float) -> FittedTable:
    columns = (
        Column("axis", left=True), Column("ranks", drop=2), Column("over", left=True, wraps=True, least=0),
        Column("payload", "bytes", drop=1), Column("as placed", "seconds"), Column("share", "share"),
        Column("in a node", "seconds", drop=3), Column("between", "seconds", drop=4), Column("calls", drop=5),
    )  # fmt: skip
    stages = roles[0].split(", ")
    name = roles[0] if len(stages) <= 4 else f"{', '.join(stages[:2])}, ... {stages[-1]}"
    where = f", {name}" if name != "all" else ""
    like = f" (others within {format_share(ALIKE)})" if roles[1:] else ""
    table = FittedTable(columns, title=f"\ncommunication of one step by axis{where}{like}, nothing overlapped")
    for use in (use for use in uses if use.seconds >= LEAST * step):
        alone = ("-" if seconds is None else seconds for seconds in (use.inside, use.between))
        link = use.link.removeprefix("the ").removesuffix(" between nodes")
        table.add_row(use.axis, use.ranks, link, use.payload_bytes, use.seconds, use.seconds / step, *alone, use.calls)
    return table


def _seconds(uses: Sequence[LinkUse]) -> float:
    return sum(use.seconds for use in uses)


def _alike(a: Sequence[LinkUse], b: Sequence[LinkUse]) -> bool:
    """Whether two roles communicate over the same axes and links, for times that hardly differ."""
    if {(use.axis, use.link) for use in a} != {(use.axis, use.link) for use in b}:
        return False
    return abs(_seconds(a) - _seconds(b)) <= ALIKE * _seconds(a)
