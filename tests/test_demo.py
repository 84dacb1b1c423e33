"""The tour: it trains for real, shows every part, and fails when one of its three claims does."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.today import EVERYTHING
from shardwise import TrainResult, UserError, compare, demo
from shardwise.cli.main import main
from shardwise.report import Bytes, LedgerRow, Role, StepReport

ROOT = Path(__file__).parents[1]


def report(source: str, **changes: int) -> StepReport:
    row = LedgerRow("backward", "all_reduce", "dp", "head", "float32", 10, changes.get("count", 1))
    held = Bytes(parameters=40, gradients=40, optimizer=80, saved=changes.get("saved", 20), comm=0, other=10)
    return StepReport(source, {"name": "m"}, "dp=2", {}, "2xCPU", (Role("all", (0, 1), held, (row,)),))


def tour(loss: float = 4.0, **changes: int) -> demo.Tour:
    summary = {"validation_loss": loss, "unigram_entropy": 5.0}
    return demo.Tour(TrainResult(Path("nowhere"), summary), compare(report("predicted"), report("measured", **changes)))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (tour(), []),
        (tour(count=2), ["ledger"]),
        (tour(saved=21), ["bytes by class"]),
        (tour(loss=5.0), ["not below the unigram entropy"]),
        (tour(loss=float("nan"), count=2), ["ledger", "unigram entropy"]),
    ],
)
def test_each_claim_can_fail(made, words):
    assert len(made.failures) == len(words)
    assert all(word in sentence for word, sentence in zip(words, made.failures, strict=True))


def test_only_stage_3_on_64_gpus_fits():
    fits = {(s, n) for s, row in demo.zero_memory().items() for n, held in row.items() if held.total <= demo.capacity()}
    assert fits == {(3, 64)}


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "thing").touch()
    with pytest.raises(UserError, match="nothing was overwritten"):
        demo.run_directory(tmp_path)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder, and in it for (function, layout) of what a tour trains the run directory that the first tour made."""
    return tmp_path_factory.mktemp("trained"), {}


@pytest.fixture
def short(monkeypatch, tmp_path, trained):
    """A tour of seconds, too short to learn, which its exit code must say; a second one takes the first one's runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "STEPS", 4)
    monkeypatch.setattr(demo, "VALIDATE_EVERY", 0)
    monkeypatch.setattr(demo, "TEXT_BYTES", 300_000)
    monkeypatch.setattr(demo, "OPTIMIZER", replace(demo.OPTIMIZER, lr=1e-6))
    folder, kept = trained

    def once(name, act):
        def call(*args, out, **options):
            key = name, str(options.get("layout"))
            if key not in kept:
                act(*args, out=out, **options)
                kept[key] = shutil.copytree(out, folder / str(len(kept)))
            else:
                shutil.copytree(kept[key], out, dirs_exist_ok=True)
            return TrainResult.read(Path(out))

        return call

    for name in ("train", "resume"):
        monkeypatch.setattr(demo, name, once(name, getattr(demo, name)))


def test_a_short_tour(short, capsys):
    assert main(["demo"]) == 1
    out = capsys.readouterr().out
    for words in (
        "35.3 GB",
        "rows equal",
        "bytes by class equal",
        "not below the unigram entropy",
        "failed: the valid",
    ):
        assert words in out
    assert Path("runs/demo-1/report.html").absolute().as_uri() in out
    page = Path("runs/demo-1/report.html").read_text()
    assert all(words in page for words in ("tiny-llama", "llama-3-70b", "ledger", "validation_loss"))


def test_json_is_one_object(short, capsys):
    assert main(["demo", "--json", "--out", "here"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["page"] == "here/report.html" and Path(data["page"]).is_file()
    assert data["comparison"]["equal_ledger"] and data["comparison"]["exact_classes_equal"]
    assert data["zero"]["bytes_per_gpu"]["3"]["64"] < data["zero"]["capacity"]
    assert len(data["failures"]) == 1 and data["training"]["steps"] == 4


@pytest.mark.skipif(not EVERYTHING, reason="a minute long: make test-all")
def test_the_whole_tour(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "demo", "--json"], cwd=tmp_path, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    training = json.loads(done.stdout)["training"]
    assert training["validation_loss"] < training["unigram_entropy"] - 0.5
