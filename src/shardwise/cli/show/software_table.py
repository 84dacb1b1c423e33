"""Table of one layout as each training engine would run it: what it cannot express, else the step by its profile."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.cluster import Cluster
from shardwise.interop.writing.canonical import DEFAULTS
from shardwise.interop.writing.writer import WRITERS, forced_layout, why_not_written
from shardwise.layout import Layout, Workload
from shardwise.model.parameters import Model
from shardwise.planner.pricing import price_all
from shardwise.planner.runnable import training_engine
from shardwise.predict.time.pricing import Pricing
from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_time


@dataclass(frozen=True)
class SoftwareStep:
    """One engine's step. seconds, low, high: of the layout, by the engine's profile; None where `cannot` says what it
    cannot express."""

    engine: str
    profile: str
    cannot: str
    seconds: float | None = None
    low: float | None = None
    high: float | None = None


def software_steps(model: Model, layout: Layout, workload: Workload, cluster: Cluster) -> tuple[SoftwareStep, ...]:
    """A row for each engine that trains and that `emit` writes for."""
    writers = [writer for writer in WRITERS.values() if not writer.serves]
    layouts = {one.name: forced_layout(one, layout, model) for one in writers}
    reasons = {one.name: why_not_written(one, layouts[one.name], model) for one in writers}
    can = [writer for writer in writers if not reasons[writer.name]]
    # A profile has the type in which its software sums gradients; plans do not search it.
    searched = [replace(layouts[writer.name], grads=DEFAULTS["grads"]) for writer in can]
    asked = [(one, training_engine(writer.profile)) for one, writer in zip(searched, can, strict=True)]
    steps = dict(zip([writer.name for writer in can], price_all(model, asked, workload, Pricing(cluster)), strict=True))
    rows = []
    for writer in writers:
        one = steps.get(writer.name)
        times = (float(one.seconds), float(one.range.low), float(one.range.high)) if one else ()
        rows.append(SoftwareStep(writer.name, writer.profile, reasons[writer.name], *times))
    return tuple(rows)


def software_tables(rows: Sequence[SoftwareStep], engine: str) -> Iterator[Renderable]:
    """The rows against the engine that is written for."""
    base = next(row.seconds for row in rows if row.engine == engine)
    assert base is not None
    yield "\nthe layout that is written, under each engine's profile"
    columns = (
        Column("engine", left=True), Column("profile", left=True, drop=1), Column("step", "seconds"),
        Column("80% range"), Column(f"against {engine}", "change"), Column("cannot express", left=True, wraps=True),
    )  # fmt: skip
    table = FittedTable(columns)
    for row in rows:
        if row.seconds is None or row.low is None or row.high is None:
            table.add_row(row.engine, row.profile, None, None, None, row.cannot)
            continue
        span = f"{format_time(row.low)} to {format_time(row.high)}"
        change = row.seconds / base - 1 if row.engine != engine else None
        table.add_row(row.engine, row.profile, row.seconds, span, change)
    yield table
    yield "bytes of the layout are counted as this runtime holds them: allocators and kernels of others may add to them"
