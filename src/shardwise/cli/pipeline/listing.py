"""`shardwise pipeline list`: which schedules there are."""

from __future__ import annotations

import argparse

from shardwise.cli.output import print_json, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(args: argparse.Namespace) -> int:
    from shardwise.schedule.pipeline import generators
    from shardwise.schedule.pipeline.closed_forms import FORMS

    known = generators()
    if args.json:
        fields = ("name", "summary", "source", "shape", "train", "virtual", "options")
        formulas = ({"bubble": FORMS[g.name].text, "holds": FORMS[g.name].note} for g in known)
        print_json([{name: getattr(g, name) for name in fields} | f for g, f in zip(known, formulas, strict=True)])
        return 0

    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("", "V", "options", "bubble", "what it does", "source"):
        table.add_column(heading)
    for g in known:
        virtual = "1" if g.virtual == 1 else "2" if g.shape == "vee" else "2 or more"
        table.add_row(g.name, virtual, ", ".join(g.options), FORMS[g.name].text, g.summary, g.source)
    notes = [f"{g.name}: {FORMS[g.name].note}" for g in known if FORMS[g.name].note]
    show(table, "\nwhere the bubbles of the table hold, while messages take no time:", *notes)
    return 0
