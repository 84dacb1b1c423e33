"""The same model and software on more and more devices: what grows with their number, and what does not."""

import pytest

from shardwise.validation import scoreboard


@pytest.fixture(scope="module")
def predictions() -> list[scoreboard.Prediction]:
    runs, skipped = scoreboard.cases(scoreboard.read(scoreboard.SCALING))
    found, refused = scoreboard.predict(runs)
    assert not refused
    assert {one.reason for one in skipped} <= {"duplicate of the same configuration"}
    return found


def test_every_row_has_a_source(predictions: list[scoreboard.Prediction]):
    assert len(predictions) == 54
    assert all("github " in one.case.row["source"] for one in predictions)


def test_interleaved_stages_explain_megatron_core_on_4608_gpus(predictions: list[scoreboard.Prediction]):
    rows = [one for one in predictions if one.case.source == "megatron-lm-h100-strong"]
    assert [one.case.row["gpus"] for one in rows] == [96, 144, 288, 576, 1152, 2304, 3072, 4608]
    errors = [one.error for one in rows]
    assert max(errors) - min(errors) < 0.06
    assert all("virtual stages not stated: 16" in one.case.assumed for one in rows)


def test_state_sharded_in_a_node_is_as_fast_on_1024_gpus(predictions: list[scoreboard.Prediction]):
    """InternLM with zero1=8: what it adds with the number of nodes is what the all-reduce between them takes."""
    rows = [one for one in predictions if "zero1=8" in one.case.row["notes"] and one.case.row["gpus"] > 8]
    weak = [one for one in rows if one.case.row["gbs"] == 8 * one.case.row["gpus"]]
    assert len(weak) == 14
    assert all(abs(one.error) < 0.06 for one in weak)
