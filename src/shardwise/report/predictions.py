"""Two predictions side by side: what differs, in time, bytes and communication. Nothing has to be equal."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.report.palette import classes_of
from shardwise.report.step_report import HOMES, StepReport
from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_share, format_things, format_time


@dataclass(frozen=True)
class Quantity:
    """One number of both predictions; None where a side has none."""

    name: str
    unit: str
    """"s" or "bytes"."""
    a: float | None
    b: float | None

    @property
    def change(self) -> float | None:
        """(b - a) / a; None without both, or where only `a` is zero."""
        if self.a is None or self.b is None:
            return None
        if self.a == self.b:
            return 0.0
        return (self.b - self.a) / self.a if self.a else None

    def shown(self, value: float | None) -> str:
        if value is None:
            return "not priced"
        return format_time(value) if self.unit == "s" else format_bytes(value)


def are_predictions(a: StepReport, b: StepReport) -> bool:
    """Whether neither report is of a run or a dry run."""
    return a.source == b.source == "predicted"


def quantities(a: StepReport, b: StepReport) -> list[Quantity]:
    """The step's time; bytes of each side's fullest rank; payload per collective of the rank that has most."""
    rows = [Quantity("step", "s", a.time, b.time)]
    full = [max(report.roles, key=lambda role: role.peak_bytes) for report in (a, b)]
    rows.append(Quantity("peak memory", "bytes", *(role.peak_bytes for role in full)))
    for field, kind in classes_of(role.bytes for role in full).items():
        rows.append(Quantity(kind.label, "bytes", *(getattr(role.bytes, field) for role in full)))
    for home in HOMES:
        if any(getattr(role, home).total for role in full):
            rows.append(Quantity(f"on the {home}", "bytes", *(getattr(role, home).total for role in full)))
    sent = [report.busiest.payloads for report in (a, b)]
    rows.append(Quantity("communicated", "bytes", *(sum(payloads.values()) for payloads in sent)))
    for op, axes in sorted(sent[0] | sent[1]):
        rows.append(Quantity(f"{op} ({axes})", "bytes", *(payloads.get((op, axes), 0) for payloads in sent)))
    return rows


def prediction_conclusion(a: StepReport, b: StepReport) -> str:
    """B against A in one sentence."""
    by_name = {row.name: row for row in quantities(a, b)}
    parts = [
        text.format(f"{format_share(abs(change))} {'less' if change < 0 else 'more'}")
        for name, text in _CLAUSES.items()
        if (change := by_name[name].change)
    ]
    if not parts:
        return "A and B take equal time, memory and communication."
    return f"Compared with A, B {', '.join(parts[:-1])}{' and ' if parts[1:] else ''}{parts[-1]}."


_CLAUSES = {"step": "takes {} time", "peak memory": "needs {} memory per rank", "communicated": "communicates {} bytes"}


def prediction_tables(a: StepReport, b: StepReport) -> Iterator[Renderable]:
    """The conclusion, what A and B are, and a row per quantity."""
    yield prediction_conclusion(a, b)
    for name, report in (("A", a), ("B", b)):
        workload = report.workload
        yield (
            f"{name}: {report.model.get('name', 'a model')}, {report.layout} on {report.cluster}, "
            f"{format_things(workload.get('batch', 0), 'sequence')} of {workload.get('seq')} tokens"
        )
    yield ""
    columns = (Column("per rank and step", left=True), Column("A"), Column("B"), Column("B against A"))
    table = FittedTable(columns)
    for row in quantities(a, b):
        if row.name == "communicated":
            table.ends.add(len(table.rows) - 1)
        change = "" if row.change is None else "equal" if not row.change else format_share(row.change, signed=True)
        table.add_row(row.name, row.shown(row.a), row.shown(row.b), change, end_section=row.name == "step")
    yield table
    yield "bytes are those of each side's fullest rank, communication that of the rank that has most (payload)"


def predictions_json(a: StepReport, b: StepReport) -> dict[str, Any]:
    """The conclusion and the rows, for --json."""
    rows = [asdict(row) | {"change": row.change} for row in quantities(a, b)]
    return {"conclusion": prediction_conclusion(a, b), "quantities": rows}
