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


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--cluster 2xCPU --measure", "shardwise calibrate device --ranks 2 --out FILE.toml"),
        ("--cluster 2xH100 --measure", "torch sees no CUDA device here"),
        ("--cluster HERE --measure --device cuda", "has devices of kind cpu"),
        ("--cluster HERE --measure --repeats 0", "--repeats 0: give a number of steps from 1"),
        ("--cluster HERE --measure --dry-run", "--dry-run does nothing with --measure"),
        ("--cluster HERE --measure --links", "--links does nothing with --measure"),
        ("--cluster HERE --device cpu", "--device belongs to --measure"),
        ("--cluster 2xH100 --transport gloo --measure", "torch sees no CUDA device here"),
    ],
)
def test_mistakes_take_one_line(command, here, argv, words):
    full = ("estimate", "tiny-llama", "--layout", "dp=2,precision=fp32", "--seq", "64", "--batch", "8")
    code, _, err = command(*full, *argv.replace("HERE", str(here)).split())
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1, err


def test_without_torch_and_with_a_module_there_is_one_line(command, here, monkeypatch):
    full = ("estimate", "tiny-llama", "--layout", "dp=2,precision=fp32", "--cluster", here, *STEP)

    def missing(what, *names):
        raise estimate_measure.UserError(f"{what} needs torch")

    monkeypatch.setattr(estimate_measure, "require", missing)
    code, _, err = command(*full)
    assert code == 2 and "--measure needs torch" in err


def test_a_share_larger_than_the_machine(command, here):
    code, _, err = command(
        "estimate", "llama-3-70b", "--layout", "dp=2", "--cluster", here, "--seq", 4096, "--batch", 2, "--measure"
    )
    assert code == 2 and "2 shares of this layout need" in err and "in this machine's memory" in err
