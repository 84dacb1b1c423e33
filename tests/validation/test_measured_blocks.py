"""Kernels and blocks measured on one H100 against the time model, each model left out."""

import json
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.validation.scoreboard import block_scores, read_blocks
from shardwise.validation.scoreboard.blocks import MeasuredRow

ROWS = Path(__file__).with_name("h100_rows.json")
MOST = {
    "eager blocks": 0.08,
    "compiled blocks": 0.12,
    "attention forward": 0.10,
    "attention forward and backward": 0.10,
    "products": 0.07,
}
"""Kind -> mean absolute error that its rows must stay below."""


def test_kinds_stay_within_their_bounds():
    cluster, rows = read_blocks(ROWS)
    assert cluster.device.name == "H100-80GB-SXM"
    scores = {score.kind: score for score in block_scores(cluster, rows)}
    assert set(scores) == {*MOST, "host-bound"}
    for kind, most in MOST.items():
        assert scores[kind].mean_abs_error < most, scores[kind]
        assert scores[kind].rows >= 5


def test_rows_whose_launches_are_not_hidden_are_apart():
    assert MeasuredRow("products", "m", 1.0, device=1.9, host=1.0).host_bound
    assert not MeasuredRow("products", "m", 1.0, device=2.0, host=1.0).host_bound
    assert MeasuredRow("products", "m", 1.0, device=1.0, host=0.0).error == pytest.approx(0.0)
    assert MeasuredRow("products", "m", 2.0**0.25, device=1.0, host=1.0).error == pytest.approx(0.0)


def test_a_slower_device_is_seen():
    cluster, rows = read_blocks(ROWS)
    compiled = [row for row in rows if row.get("mode") == "compiled"]
    slower = [{key: 1.5 * value if key.endswith("_s") else value for key, value in row.items()} for row in compiled]
    scores = {score.kind: score for score in block_scores(cluster, slower)}
    assert scores["compiled blocks"].bias < -0.25


def test_files_of_another_form(tmp_path):
    path = tmp_path / "blocks.json"
    for text, words in (
        ("[]", "must be a JSON object"),
        ('{"device": "Gaudi 9", "rows": []}', "device 'Gaudi 9' is not in the catalog"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            read_blocks(path)
    with pytest.raises(UserError, match="cannot read"):
        read_blocks(tmp_path / "none.json")
    with pytest.raises(UserError, match="no row is one of block, attention, product"):
        block_scores(read_blocks(ROWS)[0], [{"what": "launch"}])


def test_the_command(capsys):
    assert main(["validate", "--blocks", str(ROWS)]) == 0
    out = capsys.readouterr().out
    assert "eager blocks" in out and "host-bound" in out
    assert main(["validate", "--blocks", str(ROWS), "--json"]) == 0
    assert {row["kind"] for row in json.loads(capsys.readouterr().out)} == {*MOST, "host-bound"}
