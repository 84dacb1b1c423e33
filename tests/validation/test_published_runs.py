import re
from collections import defaultdict
from pathlib import Path

import pytest

from shardwise.predict import estimate
from shardwise.predict.time.profiles import ENGINES
from shardwise.predict.time.ranges import LARGE, large_run
from shardwise.validation import scoreboard

PAGE = Path(__file__).parents[2] / "docs" / "published_runs.md"


@pytest.fixture(scope="module")
def predictions() -> list[scoreboard.Prediction]:
    runs, skipped = scoreboard.cases(scoreboard.read(scoreboard.RUNS))
    found, refused = scoreboard.predict(runs)
    assert not skipped and not refused
    return found


def test_every_row_names_its_engine_and_its_source():
    for row in scoreboard.read(scoreboard.RUNS):
        assert row["engine"] in ENGINES
        assert re.search(r"arXiv \d{4}\.\d{4,5}", row["source"]), row["source"]
        assert row.get("iter_time_s") or row["tflops_convention"]


def test_errors_are_within_the_bounds_of_the_page(predictions: list[scoreboard.Prediction]):
    errors = [abs(one.error) for one in predictions]
    assert len(errors) == 28
    assert sum(errors) / len(errors) < 0.12
    for one in predictions:
        bound = 0.30 if one.case.model.experts else 0.20
        assert abs(one.error) < bound, one.case.describe()


def test_large_runs_are_said_to_take_longer_as_they_did(predictions: list[scoreboard.Prediction]):
    longer = [one.measured / one.seconds - 1 for one in predictions if one.case.row["gpus"] >= LARGE]
    (note,) = large_run(LARGE)
    assert f"{len(longer)} published steps" in note
    assert f"{100 * sum(longer) / len(longer):.0f}% longer" in note and f"at most {100 * max(longer):.0f}%" in note
    assert not large_run(LARGE - 1)
    report = estimate("llama-3-8b", "dp=1024,zero=1", seq=2048, batch=1024, cluster="128x8xH100")
    assert note in report.notes


def test_the_page_has_every_run_with_its_prediction(predictions: list[scoreboard.Prediction]):
    rows = defaultdict(list)
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6:
            rows[cells[0]].append(cells)
    for one in predictions:
        row = one.case.row
        shown = f"{one.measured:.2f}, {one.seconds:.2f} s, {100 * one.error:+.1f}%"
        assert any(cells[3] == shown for cells in rows[f"{row['source_id']}, {row['model']}"]), shown
