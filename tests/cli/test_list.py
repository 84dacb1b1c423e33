"""`shardwise list`: what the catalogs and the layout text have is named, with --json, at 80 columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields

import pytest

from shardwise.cluster.accelerators import accelerators
from shardwise.layout.layout import Layout
from shardwise.model.catalog import catalog
from shardwise.predict.time.profiles import ENGINES
from shardwise.schedule import algorithms
from shardwise.schedule.pipeline import generators

Command = Callable[..., tuple[int, str, str]]
NAMES = {
    "models": list(catalog()),
    "devices": list(accelerators().devices),
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


@pytest.mark.parametrize("what", ["models", "devices", "layout-keys"])
def test_tables_fit_80_columns(what: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, command("list", what)[1].splitlines())) <= 80


def test_every_layout_key_has_a_meaning(command: Command) -> None:
    assert all(row["meaning"] for row in json.loads(command("list", "layout-keys", "--json")[1]))


def test_an_unknown_list_is_one_line(command: Command) -> None:
    code, out, err = command("list", "gpus")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "devices" in err
