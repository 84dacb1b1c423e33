"""Published layouts beside the winners of a search: sources, layouts of their clusters, a page of today's prices."""

import json
import re
from pathlib import Path

import pytest

from shardwise.layout import Layout, Workload, check
from shardwise.model.changes import change
from shardwise.planner.pricing import price_one
from shardwise.predict.arguments import as_cluster, as_config
from shardwise.predict.fixing import fixed_of
from shardwise.predict.time.pricing import Pricing
from shardwise.predict.time.profiles import engine
from shardwise.validation import scoreboard

PAGE = Path(__file__).parents[2] / "docs" / "published_choices.md"
ROWS = json.loads(scoreboard.PUBLISHED_CHOICES.read_text(encoding="utf-8"))
NEAR = 1.10


def cells(row) -> list[str]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {row['publisher']}, {row['id']} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_twelve_pairs_of_four_publishers():
    pairs = {(row["model"], row["cluster"]) for row in ROWS}
    assert len(pairs) >= 12
    assert {row["publisher"] for row in ROWS} == {"Meta", "NVIDIA", "DeepSeek", "torchtitan"}
    assert len({row["id"] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_every_row_has_a_source_and_a_layout_of_its_cluster(row):
    assert re.search(r"arXiv \d{4}\.\d{4,5}|[\w.-]+/[\w.-]+@\w+", row["source"]), row["source"]
    model, layout = change(as_config(row["model"]), row.get("changes", "")), Layout.parse(row["layout"])
    assert layout.ranks == as_cluster(row["cluster"]).devices
    check(layout, model, Workload(batch=row["batch"], seq=row["seq"]), layout.ranks)
    fixed_of(row.get("search", ""))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_the_page_has_every_row_and_explains_what_is_far_off(row):
    ratio = float(cells(row)[-1])
    assert ratio <= NEAR or row["why"]
    assert not row["why"] or row["why"] in PAGE.read_text(encoding="utf-8") or ratio <= NEAR


@pytest.mark.parametrize("row", ROWS[3:16:4], ids=lambda row: row["id"])
def test_the_page_has_the_price_of_today(row):
    model, cluster = change(as_config(row["model"]), row.get("changes", "")), as_cluster(row["cluster"])
    workload = Workload(batch=row["batch"], seq=row["seq"])
    one = price_one(model, Layout.parse(row["layout"]), workload, engine(row["engine"]), Pricing(cluster))
    assert cells(row)[4] == f"{one.seconds:.2f} s"
