"""`shardwise list`: what the catalogs and the layout text have is named, with --json, at 80 columns."""

import json
import re
from collections.abc import Callable
from dataclasses import fields

import pytest

from shardwise.cluster.accelerators import accelerators
from shardwise.layout import Layout
from shardwise.model.catalog import catalog
from shardwise.predict.time.profiles import ENGINES
from shardwise.schedule import algorithms
from shardwise.schedule.pipeline import generators

Command = Callable[..., tuple[int, str, str]]
NAMES = {
    "models": list(catalog()),
    "devices": list(accelerators().devices),
    "links": [name for name, link in accelerators().links.items() if link.bandwidth],
    "engines": list(ENGINES),
    "schedules": [each.name for each in generators()],
    "algorithms": sorted({each.name for each in algorithms()}),
    "layout-keys": [field.name for field in fields(Layout)],
}


@pytest.mark.parametrize("what", NAMES)
def test_every_name_is_listed(what: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = command("list", what)
    assert code == 0 and err == ""
    words = out.replace(",", " ").split()
    assert set(NAMES[what]) <= set(words)
    code, out, _ = command("list", what, "--json")
    assert code == 0 and all(f'"{name}"' in out for name in NAMES[what])


@pytest.mark.parametrize("what", ["models", "models --weights", "devices", "links", "layout-keys"])
def test_tables_fit_80_columns(what: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, command("list", *what.split())[1].splitlines())) <= 80


def test_every_layout_key_has_a_meaning(command: Command) -> None:
    assert all(row["meaning"] for row in json.loads(command("list", "layout-keys", "--json")[1]))


def test_weights_of_several_models(command: Command) -> None:
    code, out, _ = command("list", "models", "llama-3-8b", "qwen2.5-32b", "--weights")
    assert code == 0
    assert re.search(r"^ *llama-3-8b +8\.03B +32\.1 GB +16\.1 GB +8\.03 GB +4\.02 GB$", out, re.MULTILINE)
    (llama, qwen) = json.loads(command("list", "models", "llama-3-8b", "qwen2.5-32b", "--json")[1])
    for row in (llama, qwen):
        assert row["weight_bytes"]["bf16"] == 2 * row["parameters"] == 4 * row["weight_bytes"]["int4"]


def test_models_are_in_families_with_active_parameters_cache_and_what_they_can_do_here(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = ("openai/gpt-oss-20b", "Qwen/Qwen3-Next-80B-A3B-Instruct", "gemma-2-9b")
    code, out, _ = command("list", "models", *names)
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    lines = [line.split() for line in out.splitlines()]
    assert ["gpt_oss:"] in lines and ["qwen3_next:"] in lines
    assert ["openai/gpt-oss-20b", "20.9B", "4.19B", "49.2", "kB", "plan"] in lines
    assert ["gemma-2-9b", "9.24B", "344", "kB", "all"] in lines
    oss, following, gemma = json.loads(command("list", "models", *names, "--json")[1])
    assert oss["cache_bytes_per_token_by_kind"] == {"window": 24576, "full": 24576} and oss["window"] == 128
    assert oss["here"] == ["count", "plan"] and gemma["here"][-2:] == ["train", "generate"]
    # 36 layers of 32 states of 128 x 128, and the last inputs of their convolutions.
    assert following["state_bytes_per_sequence"] == 2 * 36 * (32 * 128 * 128 + 8192 * 4)
    assert (oss["parameters"], following["parameters"]) == (20_914_757_184, 79_674_391_296)


def test_every_device_has_its_links(command: Command) -> None:
    rows = json.loads(command("list", "links", "--json")[1])
    known = {
        name
        for name, entry in accelerators().devices.items()
        if entry.intra.bandwidth is not None or entry.inter.bandwidth is not None
    }
    assert {device for row in rows for device in row["devices"]} == known
