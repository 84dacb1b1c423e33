"""A certificate from layouts: a job per number of ranks, then the smallest layouts of what is wrong."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from shardwise.certify.adapter import MOST_RANKS, Adapter
from shardwise.certify.compare import AFTER_LOAD, Case
from shardwise.certify.rank import CertifyJob
from shardwise.certify.result import COLUMNS, PROPERTIES, VARIANTS, Cell, Certificate, LayoutRow, WrongCell
from shardwise.certify.script import reproduction
from shardwise.errors import UserError
from shardwise.runtime.job.launch import USER_MISTAKE, supervise
from shardwise.runtime.job.locks import temporary_folder
from shardwise.runtime.measure.job import PATIENCE

LIMIT = 60.0
"""Seconds that a rank waits for others."""
LAYOUTS = 6
"""Layouts of a certificate, where none are named."""
CASES = 10
"""Cases of one job of ranks: engines leave process groups behind, with threads of their own. Groups cannot be taken
down, since DTensor keeps meshes in its caches."""
QUIET = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
"""Environment of ranks, without progress bars of libraries."""
Cells = dict[str, Cell]


class CaseKey(NamedTuple):
    """One layout of a model under a variant."""

    layout: str
    model: str
    variant: str


def certify(
    engine: str, *, layouts: Sequence[str] = (), count: int = LAYOUTS, models: Sequence[str] = (), seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Certificate:  # fmt: skip
    """Compare an engine with its model on one device.

    engine: one of `engines.ENGINES`, or the path of an adapter. layouts: texts, or none for `count` of the adapter's.
    models: names of the adapter's, or none for its first. seed: of the choice of layouts. say: gets a line before every
    job of ranks.
    Raises `UserError` for an unknown engine, model or layout, and `RunFailed` when no job of ranks can start.
    """
    began = time.monotonic()
    adapter = Adapter.load_from(engine)
    models = list(dict.fromkeys(models)) or list(adapter.models)[:1]
    if unknown := next((name for name in models if name not in adapter.models), None):
        raise UserError(f"{adapter.name} has no model {unknown!r}: it has {', '.join(adapter.models)}")
    chosen = list(dict.fromkeys(layouts)) or adapter.layouts(count, seed)
    if not chosen:
        raise UserError(
            f"{adapter.name}: space makes no layout of 2 to {MOST_RANKS} ranks; its axes: {', '.join(adapter.axes)}"
        )
    if few := next((text for text in chosen if adapter.ranks(adapter.parse(text)) < 2), None):
        raise UserError(f"layout {few!r} has one rank: there is nothing to compare")
    keys = [CaseKey(text, name, variant) for name in models for text in chosen for variant in adapter.variants]
    numbers, runs = versions(adapter), _Runs(engine, adapter, say)
    cells = runs.compare(keys)
    rows = tuple(_row(adapter, text, name, cells) for name in models for text in chosen)
    findings = _findings(runs, adapter, rows)
    return Certificate(
        adapter.name, "float64" if adapter.exact else "float32", numbers, rows, findings,
        time.monotonic() - began,
    )  # fmt: skip


def versions(adapter: Adapter) -> dict[str, str]:
    """Distribution -> version, Python's included. Raises `UserError` where one is missing."""
    result = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in adapter.needs:
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            raise UserError(f"{adapter.name} needs {name}: pip install {name}") from None
    return result


class _Runs:
    def __init__(self, engine: str, adapter: Adapter, say: Callable[[str], None]) -> None:
        self.engine = engine if not Path(engine).is_file() else str(Path(engine).resolve())
        self.adapter, self.say = adapter, say
        self.cells: dict[CaseKey, Cells] = {}

    def compare(self, keys: Sequence[CaseKey]) -> dict[CaseKey, Cells]:
        """Run those that have not run yet."""
        sizes: dict[int, list[CaseKey]] = defaultdict(list)
        for key in keys:
            if key not in self.cells:
                sizes[self.adapter.ranks(self.adapter.parse(key.layout))].append(key)
        for ranks, group in sorted(sizes.items()):
            texts = list(dict.fromkeys(key.layout for key in group))
            others = dict(zip(texts, texts[1:] + texts[:1], strict=True))
            while group:
                self.say(f"{len(group)} cases on {ranks} ranks")
                group = [*self._run(ranks, group[:CASES], others), *group[CASES:]]
            self._forgive(others)
        return self.cells

    def _other(self, key: CaseKey, other: str) -> str:
        """The layout that loads: the next one; under dropout where it has the same masks."""
        first, second = (self.adapter.masks(self.adapter.parse(text))[:2] for text in (key.layout, other))
        return other if first == second or key.variant != "dropout" else key.layout

    def _forgive(self, others: dict[str, str]) -> None:
        """Wrong gradients after a load are not the checkpoint's where the layout that loads has them anyway."""
        for key in [key for key in self.cells if key.layout in others]:
            other = self.cells.get(key._replace(layout=others[key.layout]))
            wrong = other is not None and other["gradients"].state == "wrong"
            if wrong and self.cells[key]["resume"].kind == AFTER_LOAD:
                note = "gradients of the layout that loads are wrong"
                self.cells[key]["resume"] = Cell("not run", note=note)

    def _run(self, ranks: int, keys: list[CaseKey], others: dict[str, str]) -> list[CaseKey]:
        """Run a job. Returns the keys behind one that has ended it."""
        cases = tuple(Case(*key, self._other(key, others[key.layout])) for key in keys)
        with temporary_folder() as folder:
            out, file = folder / "cells.jsonl", folder / "job.json"
            job = CertifyJob(timeout=LIMIT, out=str(out), adapter=self.engine, cases=cases)
            file.write_text(json.dumps(job.to_json()))
            command = [sys.executable, "-m", "shardwise.certify.rank", str(file)]
            ending = supervise(command, ranks, patience=PATIENCE, rank0_stdout=2, env=QUIET)
            lines = out.read_text().splitlines() if out.exists() else []
        for line in lines:
            number, cells = json.loads(line)
            self.cells[keys[number]] = {name: Cell.from_json(cell) for name, cell in cells.items()}
        if ending.code == USER_MISTAKE or ending.code > 128:  # a signal from outside is not the engine's doing
            raise ending.error() or UserError(ending.line)
        left = [key for key in keys if key not in self.cells]
        for first in left[:1]:
            self.cells[first] = dict.fromkeys(PROPERTIES, Cell("failed", note=ending.line or "the ranks ended"))
            for key in left[1:] if first.variant == "plain" else []:  # variants would end, or wait, again
                if key.layout == first.layout and key.model == first.model:
                    cell = Cell("not run", note="its plain variant ended the ranks")
                    self.cells[key] = dict.fromkeys(PROPERTIES, cell)
        return [key for key in left if key not in self.cells]


def _row(adapter: Adapter, layout: str, model: str, cells: dict[CaseKey, Cells]) -> LayoutRow:
    """The cells of the plain variant, then one per other variant: its first that is wrong, failed or refused, else the
    one with the largest error."""
    row = dict(cells[CaseKey(layout, model, "plain")])
    for variant in list(VARIANTS)[1:]:
        row[variant] = Cell("not run", note="the adapter has none")
        if seen := cells.get(CaseKey(layout, model, variant)):
            bad = [cell for state in ("wrong", "failed", "refused") for cell in seen.values() if cell.state == state]
            proven = sorted((c for c in seen.values() if c.state == "proven"), key=lambda cell: -(cell.error or 0.0))
            row[variant] = [*bad, *proven, *seen.values()][0]
    ranks = adapter.ranks(adapter.parse(layout))
    return LayoutRow(layout, model, ranks, {column: row[column] for column in COLUMNS})


def _findings(runs: _Runs, adapter: Adapter, rows: Sequence[LayoutRow]) -> tuple[WrongCell, ...]:
    """Wrong cells by kind, at the smallest layout that has it, with the plain variant where that has it."""
    groups: dict[tuple[str, str, str, str], list[tuple[LayoutRow, str]]] = {}
    for column in COLUMNS:
        for row in rows:
            cell = row.cells[column]
            if cell.state == "wrong":
                groups.setdefault((row.model, cell.note, cell.kind, cell.parameter), []).append((row, column))
    starts = [min(group, key=lambda at: (at[1] not in PROPERTIES, at[0].ranks)) for group in groups.values()]

    def keys(row: LayoutRow, column: str) -> list[CaseKey]:
        variant = column if column in VARIANTS else "plain"
        return [CaseKey(text, row.model, variant) for text in adapter.smaller(adapter.parse(row.layout))]

    cells = runs.compare([key for start in starts for key in keys(*start)])
    findings = []
    for (row, column), group in zip(starts, groups.values(), strict=True):
        layout, cell = row.layout, row.cells[column]
        for key in keys(row, column):
            if cells[key][cell.note].state == "wrong":
                layout, cell = key.layout, cells[key][cell.note]
                break
        at = tuple(dict.fromkeys(f"{row.layout} ({column})" for row, column in group))
        finding = WrongCell(column, row.model, layout, cell, at)
        variant = column if column in VARIANTS else "plain"
        findings.append(replace(finding, script=reproduction(adapter, row.model, variant, finding)))
    return tuple(findings)
