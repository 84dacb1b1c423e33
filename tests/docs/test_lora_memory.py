"""The table of published runs is that of its script and data; that of cards takes too long for a test."""

import json

from harness.documents import ROOT
from lora_memory import DATA, END, PAGE, START, runs


def test_the_page_has_the_predictions_of_today() -> None:
    data = json.loads(DATA.read_text())
    inside = PAGE.read_text().partition(START)[2].partition(END)[0]
    assert inside.startswith("\n".join(runs(data)) + "\n")


def test_each_number_has_its_source_and_setting() -> None:
    data = json.loads(DATA.read_text())
    for row in (row for rows in data.values() for row in rows):
        assert row["source"].startswith("https://") and row["notes"], row
    for row in data["runs"]:
        assert {"says", "optimizer", "seq", "batch", "layout", "lora"} <= row.keys(), row
        assert str(ROOT) not in json.dumps(row)
