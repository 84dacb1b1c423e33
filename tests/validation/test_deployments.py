"""Published deployments beside the winners of `plan --serve`: sources, and a page of today's figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "published_deployments.md").read_text(encoding="utf-8")
ROWS = json.loads((DOCS / "published_deployments.json").read_text(encoding="utf-8"))
NEAR = 1.10
TODAY = (1, 2, 11)
"""Rows that are computed again: a pair of layouts, and two single ones."""


def cells(row) -> list[str]:
    """Cells of the page's row."""
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {row['publisher']}, {row['id']} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ten_deployments_and_more():
    assert len(ROWS) >= 10 and len({row["id"] for row in ROWS}) == len(ROWS)
    assert all(row["source"] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_what_is_far_off_is_explained(row):
    assert cells(row)[3] != "not among the candidates"
    assert float(cells(row)[-1]) <= NEAR or row["why"] in PAGE


@pytest.mark.parametrize("row", [ROWS[place] for place in TODAY], ids=lambda row: row["id"])
def test_the_page_has_the_figures_of_today(row, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import published_deployments

    try:
        assert cells(row) == published_deployments._cells(published_deployments._compared(row))
    finally:
        sys.modules.pop("published_deployments")
