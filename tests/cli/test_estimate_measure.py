"""`shardwise estimate --measure`: its output, its JSON, and its mistakes."""

import json

import pytest

from harness.measured_cpu import cluster
from shardwise.cli import estimate_measure
from shardwise.cluster.writing import to_toml

STEP = ("--seq", 64, "--batch", 8, "--measure", "--repeats", 2)


@pytest.fixture
def here(tmp_path):
    file = tmp_path / "here.toml"
    file.write_text(to_toml(cluster()), encoding="utf-8")
    return file


def test_the_output_has_arithmetic_waits_step_and_what_is_missing(ranks_command, here):
    code, out, err = ranks_command(
        "estimate", "tiny-llama", "--layout", "dp=2,zero=2,precision=fp32", "--cluster", here, *STEP
    )
    assert code == 0, err
    for words in (
        "a step takes", "with measured arithmetic (median of 2 steps", "predicted alone", "2 at once",
        "part of a step", "forward, loss and backward", "optimizer", "waits for collectives", "reduce_scatter",
        "equals the predicted one", "not measured: the network",
    ):  # fmt: skip
        assert words in out, words


def test_json_of_a_pipeline(ranks_command, here):
    code, out, err = ranks_command(
        "estimate", "tiny-llama", "--layout", "pp=2,precision=fp32", "--cluster", here, *STEP, "--json"
    )
    assert code == 0, err
    told = json.loads(out)
    measured = told["measured"]
    assert told["source"] == "predicted" and len(measured["repeats"]) == 2 and measured["ledger_differs"] == []
    assert measured["ranks"] == [0, 1] and measured["others"] > 0
    assert measured["low"] <= measured["seconds"] <= measured["high"]


def test_one_rank_needs_no_numbers_of_a_network(ranks_command):
    code, out, err = ranks_command("estimate", "tiny-llama", "--layout", "precision=fp32", "--cluster", "1xCPU", *STEP)
    assert code == 0, err
    assert "a step takes" in out and "predicted alone" not in out and "not measured: the network" not in out


def test_without_torch_and_with_a_module_there_is_one_line(command, here, monkeypatch):
    full = ("estimate", "tiny-llama", "--layout", "dp=2,precision=fp32", "--cluster", here, *STEP)

    def missing(what, *names):
        raise estimate_measure.UserError(f"{what} needs torch")

    monkeypatch.setattr(estimate_measure, "require", missing)
    code, _, err = command(*full)
    assert code == 2 and "--measure needs torch" in err
