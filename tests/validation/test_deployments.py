"""Published deployments beside the winners of `plan --serve`, and logs of servers: sources, and a page of today's
numbers."""

import json
import sys
from pathlib import Path
from statistics import fmean

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "published_deployments.md").read_text(encoding="utf-8")
DATA = json.loads((DOCS / "published_deployments.json").read_text(encoding="utf-8"))
ROWS = DATA["deployments"]
NEAR = 1.10
LOADED, KEPT, SERVED = 0.01, 0.012, 0.20
"""Errors of weights and of cache bytes per token up to which a row needs no reason, and of a time that is near."""
TODAY = (1, 2, 11)
"""Rows that are computed again: a pair of layouts, and two single ones."""


def cells(row) -> list[str]:
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {row['publisher']}, {row['id']} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ten_deployments_and_more():
    assert len(ROWS) >= 10 and len({row["id"] for row in ROWS}) == len(ROWS)
    assert all(row["source"] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_what_is_far_off_is_explained(row):
    assert cells(row)[2] != "not among the candidates"
    assert float(cells(row)[-1]) <= NEAR or row["why"] in PAGE


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import published_deployments

    yield published_deployments
    sys.modules.pop("published_deployments")


@pytest.mark.parametrize("row", [ROWS[place] for place in TODAY], ids=lambda row: row["id"])
def test_the_page_has_the_figures_of_today(row, page):
    assert cells(row) == page._cells(page._compared(row))


def test_servers_load_the_weights_and_keep_the_cache_that_are_predicted(page):
    assert len(DATA["loads"]) >= 20 and all(row["source"] for row in DATA["loads"])
    for row in DATA["loads"]:
        _, error = page.loaded(row)
        assert abs(error) <= LOADED or row["why"] in PAGE, row
        if "tokens" in row:
            published, predicted = page.cached(row)
            assert abs(predicted / published - 1) <= KEPT, row
        assert f"| {' | '.join(page.load_cells(row))} |" in PAGE


def test_servers_take_the_times_that_the_page_has(page):
    errors = [abs(error) for row in DATA["speeds"] if (error := page.served(row)[1]) is not None]
    assert len(errors) >= len(DATA["speeds"]) - 1
    assert fmean(errors) <= 0.22 and sum(error <= SERVED for error in errors) >= 17
    assert all(f"| {' | '.join(line)} |" in PAGE for line in page.speed_lines(DATA["speeds"]))
