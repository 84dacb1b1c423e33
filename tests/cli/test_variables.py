"""Environment variables: the cluster where it is left out, the cache of prepared text, and the table of all."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import shardwise
from harness.command_line import mistake
from harness.documents import ROOT
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import catalog
from shardwise.runtime.job.config import TrainConfig
from shardwise.runtime.job.text import with_corpus

Command = Callable[..., tuple[int, str, str]]
STEP = ("estimate", "llama-3-8b", "--layout", "dp=8,zero=2", "--seq", "8k", "--batch", "8")
INTERNAL = {"ERROR_FILE", "HOSTS", "PARENT", "PULSE", "RENDEZVOUS", "STACK"}
"""Variables from a launcher to its ranks."""


def test_the_cluster_of_the_environment(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_CLUSTER", raising=False)
    mistake(command(*STEP), "estimate needs --cluster")
    monkeypatch.setenv("SHARDWISE_CLUSTER", "8xA100")
    assert json.loads(command(*STEP, "--json")[1])["cluster"] == "8xA100-80GB-SXM"
    assert json.loads(command(*STEP, "--cluster", "8xH100", "--json")[1])["cluster"] == "8xH100-80GB-SXM"
    code, out, _ = command("plan", "llama-3-8b", "--seq", "8k", "--batch", "8", "--fix", "dp=8,zero=2,tp=1", "--json")
    assert code == 0 and json.loads(out)["cluster"] == "8xA100-80GB-SXM"
    code, out, _ = command("collective", "cost", "all-reduce", "--bytes", "1MB", "--ranks", "8", "--json")
    assert code == 0 and json.loads(out)["cluster"] == "8xA100-80GB-SXM"
    assert command("estimate", "--params", "7e9", "--zero-table", "8")[0] == 0, "which has no cluster"
    monkeypatch.setenv("SHARDWISE_CLUSTER", "8xH10")
    mistake(command(*STEP), "no device 'H10' in the catalog")


def test_the_cache_has_the_text_of_runs_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("some words to learn from\n" * 200)
    model = catalog()["tiny-llama"].replace(vocab=300)
    said: list[str] = []
    for out, cache in (("a/run", None), ("b/run", "cache"), ("c/run", "cache")):
        monkeypatch.delenv("SHARDWISE_CACHE", raising=False)
        if cache:
            monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / cache))
        config = TrainConfig(model, Layout(), Workload(8, 2), str(tmp_path / "text.txt"), str(tmp_path / out))
        said.clear()
        prepared = with_corpus(config, said.append)
        assert Path(prepared.corpus).parent == tmp_path / (cache or "a") / "corpora"
    assert said == [f"the text is prepared already: {prepared.corpus}"]


def test_every_variable_is_documented() -> None:
    files = Path(shardwise.__file__).parent.rglob("*.py")
    named = {name for file in files for name in re.findall(r"\bSHARDWISE_([A-Z_]+)", file.read_text())}
    table = set(re.findall(r"^\| `SHARDWISE_(\w+)` \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE))
    assert named == table | INTERNAL and not table & INTERNAL
