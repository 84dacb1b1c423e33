"""`shardwise validate`: the table, the JSON, and tables that cannot be read."""

import json

import pytest

from shardwise.cli.main import main
from shardwise.validation.scoreboard import PUBLISHED, read

KEYS = {
    "source", "rows", "median_abs_error", "mean_abs_error", "p90_abs_error", "bias", "coverage", "mean_width",
    "skipped",
}  # fmt: skip


def test_json_is_a_list_of_scores(capsys):
    assert main(["validate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) >= 7
    assert all(set(score) == KEYS for score in found)
    assert all(score["rows"] and score["mean_abs_error"] < 0.40 for score in found)


def test_json_has_every_row_where_they_are_asked_for(capsys):
    assert main(["validate", "--rows", "--json"]) == 0
    for score in json.loads(capsys.readouterr().out):
        assert set(score) == KEYS | {"predictions"} and len(score["predictions"]) == score["rows"]
        errors = [abs(row["error"]) for row in score["predictions"]]
        assert sum(errors) / len(errors) == pytest.approx(score["mean_abs_error"])
        for row in score["predictions"]:
            assert row["seconds"] / row["measured_seconds"] - 1 == row["error"]
            assert row["inside"] == (row["low"] <= row["measured_seconds"] <= row["high"])
            assert (row["reason"] is not None) == (abs(row["error"]) > 0.25)


def test_skipped_rows_and_misses_are_said(capsys, tmp_path):
    from shardwise.validation.scoreboard import PUBLISHED

    rows = json.loads(PUBLISHED.read_text())
    far = {**rows[0], "iter_time_s": 10 * rows[0]["iter_time_s"]}
    unknown = {**rows[0], "gpu": "Abacus"}
    (tmp_path / "table.json").write_text(json.dumps([far, unknown]))
    assert main(["validate", str(tmp_path / "table.json")]) == 0
    out = capsys.readouterr().out
    assert "rows off by more than 25%" in out
    assert "device Abacus is not in the catalog" in out


def test_memory_by_engine(capsys):
    assert main(["validate", "--memory", "--rows"]) == 0
    out = capsys.readouterr().out
    assert "nanotron" in out and "(read)" in out and "Llama-3.1-405B gpus=512" in out
    assert "megatron-bridge-moonlight: 1 row skipped: the types of its gradients" in out
    assert main(["validate", "--memory", "--json"]) == 0
    for score in json.loads(capsys.readouterr().out):
        held_out = [abs(row["error"]) for row in score["rows"] if not row["read"]]
        assert score["held_out_error"] is None or sum(held_out) / len(held_out) == pytest.approx(
            score["held_out_error"]
        )


def test_what_rows_do_not_say_is_listed(tmp_path, capsys):
    row = next(row for row in read(PUBLISHED) if row["source_id"] == "korthikanti22" and row["gpus"] > 8)
    table = tmp_path / "table.json"
    table.write_text(json.dumps([{**row, "inter_node": "carrier pigeons", "zero_stage": None}]))
    assert main(["validate", str(table)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("korthikanti22: assumed for 1 row: network 'carrier pigeons' not known: InfiniBand")
        for line in lines
    )
    assert "korthikanti22: assumed for 1 row: ZeRO stage not stated: 0" in lines
    assert main(["validate", str(table), "--json", "--rows"]) == 0
    (score,) = json.loads(capsys.readouterr().out)
    assert any("carrier pigeons" in words for words in score["predictions"][0]["assumed"])
