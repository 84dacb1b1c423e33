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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*SERVE, "--seq", "4096"], "--seq belongs to training: leave it out with --serve"),
        ([*SERVE, "--by", "memory"], "--by memory is for training"),
        (SERVE[:-2], "plan --serve needs --concurrency"),
        (["plan", "llama-3-8b", "--cluster", "8xH100", "--seq", "4096", "--batch", "8", "--prompt", "7"],
         "--prompt belongs to serving: add --serve"),
        (["plan", "llama-3-8b", "--cluster", "8xH100", "--seq", "4096", "--batch", "8", "--prompt", "0"],
         "--prompt belongs to serving: add --serve"),
        ([*SERVE, "--pue", "0"], "--pue belongs to training: leave it out with --serve"),
        ([*SERVE, "--restart", "0"], "--restart belongs to training: leave it out with --serve"),
        ([*SERVE, "--fix", ""], "--fix belongs to training: leave it out with --serve"),
        ([*SERVE[:-1], "0"], "each a positive number"),
        ([*SERVE, "--engine", "tensorrt"], "did you mean tensorrt-llm"),
        ([*SERVE, "--engine", "megatron-bridge"], "megatron-bridge does not serve; profiles that do are gpt-fast"),
        ([*SERVE, "--top", "0"], "--top must be a positive integer"),
        ([*SERVE, "--weights", "fp7"], "no format of weights 'fp7'; did you mean fp8?"),
        ([*SERVE, "--weights", "fp32"], "--weights fp32: plans of serving store weights in 16 bits or fewer"),
        ([*SERVE, "--weights", "bf16,"], "no format of weights ''"),
        (["plan", "llama-3-8b", "--cluster", "4xA100", *SERVE[4:], "--weights", "fp8"],
         "tensorrt-llm on A100-80GB-SXM has no fp8 weights; known are bf16, int8, int4"),
        ([*SERVE, "--kv-cache", "int4"], "--kv-cache must be one of auto, bf16, fp8, not 'int4'"),
        (["plan", "llama-3-8b", "--cluster", "8xH100", "--weights", "fp8"],
         "--weights belongs to serving: add --serve"),
        (["plan", "llama-3-8b", "--cluster", "8xH100", "--kv-cache", "fp8"],
         "--kv-cache belongs to serving: add --serve"),
        (["plan", "llama-3-8b,llama-3-70b", *SERVE[2:], "--weights", "fp8"],
         "--weights is for one MODEL on one cluster"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_tensor_parallelism_over_pcie_is_warned_of(capsys):
    arguments = ["plan", "llama-2-70b", "--serve", "--prompt", "512", "--output", "128", "--concurrency", "1"]
    assert main([*arguments, "--cluster", "4xA100-80GB-PCIe"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "warning: tp=4 runs over PCIe, through the host, not NVLink: " in out
    assert "of the time of a token is its communication" in out
    assert main([*arguments, "--cluster", "4xA100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
