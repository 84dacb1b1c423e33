"""Certificates: a matrix of layouts and properties, as tables, Markdown and JSON. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwise.codec import Json
from shardwise.report.table import FittedTable, headed
from shardwise.report.terminal import Renderable

PROPERTIES = {
    "loss": "loss of a rank's rows",
    "gradients": "whole gradient of every parameter",
    "norm": "gradient norm before clipping",
    "clipped": "gradients after clipping",
    "steps": "parameters after 3 steps of AdamW",
    "resume": "parameters after 2 steps, a save, a load under another layout, and the third step",
}
"""What is compared with the plain model on one device, in the order in which one follows from the other."""
VARIANTS = {
    "plain": "",
    "uneven": "ranks count other numbers of labels, one of them none",
    "tied": "embedding and head are one parameter",
    "frozen": "the embedding and the first block do not train",
    "padded": "a vocabulary of 61 tokens, which ranks do not divide",
    "idle": "experts without tokens",
    "dropout": "masks that ranks draw for their rows and parts of the sequence, from the plain model's seeds",
}
"""Kind of model and data -> what it is; all properties are compared under all of them."""
COLUMNS = (*PROPERTIES, *list(VARIANTS)[1:])

State = Literal["proven", "wrong", "refused", "failed", "not run"]
MARKS: dict[State, str] = {"proven": "yes", "wrong": "WRONG", "refused": "refused", "failed": "FAILED", "not run": "-"}


@dataclass(frozen=True)
class Cell(Json):
    """One property of one layout."""

    state: State
    error: float | None = None
    """Largest error of any rank, as a share of the norm of what is compared."""
    bound: float | None = None
    """Largest error that counts as equal."""
    parameter: str = ""
    """The first wrong parameter in the order of the model."""
    step: int = 0
    """Step of the first difference, from 1."""
    kind: str = ""
    """Guess at the mistake."""
    note: str = ""
    """Why it was refused, failed or not run; the property in which a variant is wrong."""

    @property
    def text(self) -> str:
        """One line about a cell that is not proven."""
        if self.state != "wrong":
            return self.note
        where = f" of {self.parameter}" if self.parameter else ""
        return f"{self.note}{where} differs by {self.error:.1e} of its norm at step {self.step}: {self.kind}"


@dataclass(frozen=True)
class LayoutRow(Json):
    """A layout of a model."""

    layout: str
    model: str
    ranks: int
    cells: dict[str, Cell]
    """Column -> cell."""


@dataclass(frozen=True)
class WrongCell(Json):
    """A kind of mistake, where it is smallest."""

    column: str
    model: str
    layout: str
    """The smallest layout that has it."""
    cell: Cell
    cells: tuple[str, ...]
    """Cells of the matrix that have it: "layout (column)"."""
    script: str = ""
    """Path of the reproduction, or its text in JSON."""


@dataclass(frozen=True)
class Certificate(Json):
    """Everything that was compared for an engine."""

    engine: str
    dtype: str
    versions: dict[str, str]
    rows: tuple[LayoutRow, ...]
    findings: tuple[WrongCell, ...] = ()
    seconds: float = 0.0

    @property
    def counts(self) -> dict[str, int]:
        """State -> number of cells."""
        counts = Counter(cell.state for row in self.rows for cell in row.cells.values())
        return {state: counts[state] for state in MARKS}

    @property
    def exit_code(self) -> int:
        """1 where a cell is wrong or failed, or none is proven."""
        counts = self.counts
        return int(bool(counts["wrong"] or counts["failed"]) or not counts["proven"])

    json_keys = "engine dtype versions rows findings seconds counts exit_code"

    @property
    def columns(self) -> list[str]:
        """Columns where any row has more than "not run"."""
        return [c for c in COLUMNS if any(row.cells[c].state != "not run" for row in self.rows)]

    @property
    def summary(self) -> str:
        """Versions, and how many cells there are per state."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        counts = ", ".join(f"{count} {state}" for state, count in self.counts.items() if count)
        proven = [c.error or 0.0 for row in self.rows for c in row.cells.values() if c.state == "proven"]
        largest = f"; largest error of a proven cell {max(proven):.1e}" if proven else ""
        return f"{versions}; {self.dtype}. Cells: {counts}{largest}."

    def lines(self) -> Iterator[Renderable]:
        """One screen."""
        table: FittedTable = headed(("layout", "model", *self.columns), title=self.engine)
        for row in self.rows:
            table.add_row(row.layout, row.model, *(MARKS[row.cells[c].state] for c in self.columns))
        yield table
        yield from self.notes()
        yield f"{self.summary} {self.seconds:.0f} s"

    def notes(self) -> Iterator[str]:
        """A line per finding, then per reason of a refused or failed cell."""
        for item in self.findings:
            more = f" (and {len(item.cells) - 1} cells more)" if len(item.cells) > 1 else ""
            yield f"wrong: {item.column} at {item.layout}: {item.cell.text}{more}"
            if item.script and "\n" not in item.script:
                yield f"  reproduce: {item.script}"
        where: dict[tuple[str, str], dict[str, None]] = {}
        for row in self.rows:
            for column, cell in row.cells.items():
                if cell.state in ("refused", "failed"):
                    where.setdefault((cell.state, cell.note), {})[f"{column} at {row.layout}"] = None
        for (state, note), places in where.items():
            first, *others = places
            yield f"{state}: {first}{f' and {len(others)} more' if others else ''}: {note}"

    def markdown(self) -> str:
        """The certificate as a page."""
        lines = [f"# {self.engine}", "", self.summary, ""]
        lines += [f"| layout | model | {' | '.join(self.columns)} |", f"|---|---|{'---|' * len(self.columns)}"]
        for row in self.rows:
            marks = [MARKS[row.cells[c].state] for c in self.columns]
            lines.append(f"| `{row.layout}` | {row.model} | {' | '.join(marks)} |")
        lines += ["", *(note if note.startswith("  ") else f"- {note}" for note in self.notes())]
        for item in self.findings:
            if "\n" in item.script:
                lines += ["", f"## {item.column} at {item.layout}", "", "```python", item.script.rstrip(), "```"]
        return "\n".join(lines).rstrip() + "\n"
