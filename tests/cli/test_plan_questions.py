"""Questions to `plan` beside one model on one cluster: which GPUs, which models, several models, prices, scaling."""

import json

import pytest

from shardwise.model.catalog import get
from shardwise.report.time_parts import GROUPS

SMALL = ["--seq", "2048", "--batch", "64"]


def answer(command, *words):
    code, out, err = command("plan", *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_without_a_cluster_each_kind_has_a_row_with_its_price(command):
    found = answer(command, "llama-3.2-1b", *SMALL)
    assert found["model"] == "llama-3.2-1b" and found["assumed"] == [] and len(found["devices"]) > 15
    for row in found["devices"]:
        assert (
            row["usd_per_hour"] is None or row["usd_per_hour"] == row["devices"] * row["price"]["usd_per_device_hour"]
        )
        assert row["tokens_per_second"] == pytest.approx(2048 * 64 / row["seconds"])
    code, out, _ = command("plan", "llama-3.2-1b", *SMALL)
    assert code == 0 and "USD/M tokens" in out and "they vary by provider" in out and "--cluster" in out


def test_what_is_not_given_is_the_model_s_and_said(command):
    found = answer(command, "llama-3.2-1b", "--cluster", "3xH100", "--fix", "pp=1,cp=1")
    assert found["workload"] == {"seq": 8192, "batch": 96}
    assert "--seq 8192: the usual length of pre-training" in found["assumed"][0]
    assert "--batch 96: 786,432 tokens per step" in found["assumed"][1]
    code, out, _ = command("estimate", "olmo-2-1b", "--layout", "dp=6,micro=2", "--cluster", "6xA100")
    words = " ".join(out.split())
    assert code == 0 and "assumed: --seq 4096: the context length of olmo-2-1b" in words and "--batch 192" in words
    found = answer(command, "llama-3.2-1b", "--cluster", "1xH100", "--seq", "1k", "--batch", "1k", "--fix", "tp=1")
    assert found["workload"] == {"seq": 1024, "batch": 1024} and found["assumed"] == []


def test_serving_without_a_cluster(command):
    asked = ["llama-3.2-1b", "--serve", "--prompt", "512", "--output", "64", "--concurrency", "8"]
    found = answer(command, *asked)
    assert all(row["weights"] in ("bf16", "fp8", "int8", "int4") for row in found["devices"])
    code, out, _ = command("plan", *asked)
    assert code == 0 and "serving 8 clients" in out and "--serve --prompt 512" in " ".join(out.split())


def test_several_models_have_a_row_each_and_a_reason_where_nothing_fits(command):
    asked = ["llama-3.2-1b, llama-3-405b,gpt2", "--cluster", "2xH100", "--batch", "8"]
    rows = {row["model"]: row for row in answer(command, *asked)["models"]}
    assert list(rows) == ["llama-3.2-1b", "llama-3-405b", "gpt2"]
    assert rows["gpt2"]["seq"] == get("gpt2").max_positions and rows["llama-3.2-1b"]["seq"] == 8192
    assert rows["llama-3-405b"]["layout"] is None and "does not fit 2xH100" in rows["llama-3-405b"]["reason"]
    code, out, _ = command("plan", *asked)
    assert code == 0 and "llama-3-405b: does not fit" in out and "tokens/s" in out
    served = answer(command, "gpt2,llama-3.2-1b", "--cluster", "1xL4", "--serve", "--prompt", "64", "--output", "64",
                    "--concurrency", "4")  # fmt: skip
    assert [row["weights"] for row in served["models"]] and all(row["token_seconds"] > 0 for row in served["models"])


def test_prices_are_the_catalog_s_or_the_given_one(command):
    asked = ["llama-3.2-1b", "--cluster", "2xH100", *SMALL, "--fix", "dp=2"]
    listed, given = answer(command, *asked), answer(command, *asked, "--price", "1.5", "--tokens", "1T")
    assert "list price of" in listed["price"]["source"] and given["price"]["source"] == "--price"
    assert given["price"]["usd_per_hour"] == 3.0
    assert given["run"]["cost"] == pytest.approx(given["price"]["usd_per_million_tokens"] * 1e6, rel=1e-3)
    code, out, _ = command("plan", *asked[:2], "1xB300", *SMALL)
    assert code == 0 and "no list price of B300 is recorded" in out
    served = answer(command, "llama-3.2-1b", "--cluster", "1xL4", "--serve", "--prompt", "64", "--output", "64",
                    "--concurrency", "4", "--price", "2")  # fmt: skip
    for row in served["ranked"]:
        assert row["usd_per_million_tokens"] == pytest.approx(2 / 3600 / row["tokens_per_second_per_device"] * 1e6)


def test_a_scaling_table_has_compute_communication_and_bubble_apart(command):
    asked = ["llama-3.2-1b", "--cluster", "4x2xH100", *SMALL, "--find", "scaling", "--fix", "cp=1"]
    found = answer(command, *asked)
    for size in found["sizes"]:
        assert sum(size[group] for group in GROUPS) == pytest.approx(size["seconds"])
        assert 0 < size["efficiency"] <= 1 and size["compute"] > 0
    assert found["sizes"][0]["communication"] < found["sizes"][-1]["seconds"]
    code, out, _ = command("plan", *asked)
    assert code == 0 and "communication" in out and "never above 100%" in " ".join(out.split())


def test_models_that_fit_a_memory(command):
    found = answer(command, "--find", "model", "--memory", "24GB")
    assert found["memory_bytes"] == 24 * 10**9
    assert {row["model"] for row in found["models"]} > {"llama-3-8b", "gpt2"}
    code, out, _ = command("plan", "--find", "model", "--memory", "24GB")
    assert code == 0 and "generate bf16" in out and "llama-3-8b" in out
