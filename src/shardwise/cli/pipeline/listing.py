"""`shardwise list schedules`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from shardwise.cli.output import print_result
from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable


def run(args: argparse.Namespace) -> int:
    from shardwise.schedule.pipeline import generators
    from shardwise.schedule.pipeline.closed_forms import FORMS

    fields = ("name", "summary", "source", "shape", "train", "virtual", "options")
    data = [
        {name: getattr(g, name) for name in fields} | {"bubble": FORMS[g.name].text, "holds": FORMS[g.name].note}
        for g in generators()
    ]
    return print_result(args, data, _lines())


def _lines() -> Iterator[Renderable]:
    from shardwise.schedule.pipeline import generators
    from shardwise.schedule.pipeline.closed_forms import FORMS

    table = FittedTable(
        [
            Column("schedule", left=True), Column("V", left=True, drop=1), Column("options", left=True, drop=3),
            Column("bubble", left=True), Column("what it does", left=True, wraps=True),
            Column("source", left=True, drop=2, wraps=True),
        ]
    )  # fmt: skip
    for g in generators():
        virtual = "1" if g.virtual == 1 else "2" if g.shape == "vee" else "2 or more"
        table.add_row(g.name, virtual, ", ".join(g.options), FORMS[g.name].text, g.summary, g.source)
    yield from (table, "\nwhere the bubbles of the table hold, while messages take no time:")
    yield from (f"{g.name}: {FORMS[g.name].note}" for g in generators() if FORMS[g.name].note)
