"""`shardwise plan --serve`: what it prints, and what belongs to training."""

import json

import pytest

from shardwise.cli.main import main

SERVE = ["plan", "llama-3-70b", "--cluster", "8xH100", "--serve", "--prompt", "1000", "--output", "200",
         "--concurrency", "32"]  # fmt: skip


def test_the_tables_and_what_was_weighed(capsys):
    assert main([*SERVE, "--top", "3"]) == 0
    out = capsys.readouterr().out
    for words in (
        "deployments", "first token", "per token", "tokens/s against time per token", "quantised on fewer or split",
        "gathering weights, at best", "faster than tensor parallelism from about", "fp8",
    ):  # fmt: skip
        assert words in out


@pytest.mark.parametrize("by", ["throughput", "cost", "pareto"])
def test_json_has_the_same(by, capsys):
    assert main([*SERVE, "--by", by, "--top", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["ranked"]) == 4 and found["by"] == by and found["considered"] >= found["fitting"] > 4
    for one in found["ranked"]:
        assert one["bytes"] <= found["usable_bytes"] and one["first_token_seconds"] > one["token_seconds"] > 0
        assert one["tokens_per_second_per_device"] * one["devices"] == pytest.approx(one["tokens_per_second"])


def test_tensor_parallelism_over_pcie_is_warned_of(capsys):
    arguments = ["plan", "llama-2-70b", "--serve", "--prompt", "512", "--output", "128", "--concurrency", "1"]
    assert main([*arguments, "--cluster", "4xA100-80GB-PCIe"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "warning: tp=4 runs over PCIe, through the host, not NVLink: " in out
    assert "of the time of a token is its communication" in out
    assert main([*arguments, "--cluster", "4xA100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
