"""`estimate` and `plan` with another engine's software: its memory, FP8 and partial recomputation."""

import json

from shardwise.cli.main import main

STEP = ["estimate", "llama-3-70b", "--layout", "tp=4,pp=4,dp=2,sp,zero=1", "--cluster", "4x8xH100", "--seq", "4096",
        "--batch", "32"]  # fmt: skip
SEARCH = ["plan", "llama-3-8b", "--cluster", "8xH100", "--seq", "4096", "--batch", "64", "--top", "1"]


def most(capsys, *flags):
    assert main([*STEP, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return found, max(sum(value for key, value in role["bytes"].items() if key != "absent") for role in found["roles"])


def test_estimate_counts_the_memory_and_the_time_of_an_engine(capsys):
    own, bytes_own = most(capsys)
    other, bytes_other = most(capsys, "--engine", "megatron-core")
    assert bytes_other < bytes_own and own["timing"]["engine"] == "shardwise"
    assert other["timing"]["engine"] == "megatron-core"
    assert any(note.startswith("memory is that of megatron-core") for note in other["notes"])
    narrow, bytes_narrow = most(capsys, "--engine", "megatron-core", "--precision", "fp8")
    assert bytes_narrow < bytes_other and narrow["time"] < other["time"]
    some, bytes_some = most(capsys, "--engine", "megatron-core", "--recompute-layers", "8")
    assert bytes_some < bytes_other and some["time"] > other["time"]
    _, bytes_modules = most(capsys, "--engine", "megatron-core", "--recompute-modules", "layernorm+mlp")
    assert bytes_modules < bytes_other


def test_an_engine_without_a_time_has_memory(capsys):
    found, nbytes = most(capsys, "--engine", "nanotron")
    assert nbytes and found["time"] is None
    assert any(note.startswith("no time of a step: no engine profile 'nanotron'") for note in found["notes"])


def test_plan_says_which_products_it_plans(capsys):
    assert main([*SEARCH, "--engine", "megatron-bridge", "--precision", "fp8", "--json"]) == 0
    assert "products in fp8, as megatron-bridge has them" in json.loads(capsys.readouterr().out)["notes"]
