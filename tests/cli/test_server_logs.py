"""Start-up logs that people publish (`server_logs.toml`): `explain` gives their weights and room for the cache."""

import json
import tomllib
from pathlib import Path

import pytest

LOGS = tomllib.loads((Path(__file__).parent / "server_logs.toml").read_text(encoding="utf-8"))["log"]
STATED = [row for row in LOGS if "why" not in row]
WEIGHTS = [row for row in LOGS if row.get("why", "").endswith("weights alone")]
GIB = 2**30


def explained(command, row):
    model = ("--model", row["model"]) if "model" in row else ()
    code, out, err = command("explain", row["command"], "--cluster", row["cluster"], "--json", *model)
    assert code == 0, err
    return json.loads(out)["outlook"]


@pytest.mark.parametrize(
    "row", STATED + WEIGHTS, ids=lambda row: f"{row['version']} {row['command'][11:40]} {row['cluster']}"
)
def test_a_server_has_the_memory_that_it_prints(command, row):
    found = explained(command, row)
    if "weights_gib" in row:
        assert found["weight_bytes_per_gpu"] / GIB == pytest.approx(row["weights_gib"], rel=0.03)
    if row in WEIGHTS:
        return
    if "tokens" in row:
        assert found["cache_tokens"] == pytest.approx(row["tokens"], rel=0.1)
    if "cache_gib" in row:
        assert found["cache_bytes_per_gpu"] / GIB == pytest.approx(row["cache_gib"], rel=0.1)


def test_the_defaults_of_an_a100_are_those_of_a_small_device(command):
    (row,) = (row for row in LOGS if row["url"].startswith("https://myoceane.fr"))
    found = explained(command, row)
    assert found["cache_bytes_per_gpu"] / GIB == pytest.approx(row["cache_gib"], rel=0.02)


def test_sglang_fills_its_share_with_weights_and_cache(command):
    rows = [row for row in LOGS if row["version"].startswith("SGLang") and "tokens" in row]
    for row in rows:
        assert explained(command, row)["cache_tokens"] == pytest.approx(row["tokens"], rel=0.03)
    assert len(rows) == 2


def test_sglang_has_its_own_default(command):
    """L40S: sgl-project/sglang pull request 13023 prints 0.851; RTX 4090: server_args.py's own example."""
    for device, share in (("L40S", 0.851), ("RTX-4090", 0.847), ("H100", 0.834)):
        row = {"command": "python -m sglang.launch_server --model Qwen/Qwen3-0.6B", "cluster": f"1x{device}"}
        usual = explained(command, row)["cache_tokens"]
        row["command"] += f" --mem-fraction-static {share}"
        assert usual == pytest.approx(explained(command, row)["cache_tokens"], rel=0.001), device


def test_logs_that_are_listed_say_why():
    assert len(LOGS) >= 57 and len(STATED) >= 24 and len({row["url"] for row in LOGS}) >= 33
    assert all(len(row["why"]) > 20 for row in LOGS if "why" in row)
