"""Layouts with context parallelism that cannot be had: one line, exit code 2, before any rank starts."""

from pathlib import Path

import pytest

from harness.command_line import mistake
from shardwise.model import catalog

CASES = (
    ("cp=8", 8, 12, ("16 chunks", "12 tokens", "at most cp=6")),
    ("cp=2", 2, 3, ("4 chunks", "at most cp=1")),
    ("cp=3,cpkind=ulysses", 3, 12, ("cpkind=ulysses does not suit", "valid cp: 1, 2, 4, 8", "cpkind=ring")),
    ("cp=4,tp=4,cpkind=ulysses", 16, 12, ("the 2 that a tp rank has", "valid cp: 1, 2,")),
    ("cp=2,tp=2,tpkind=gathered", 4, 12, ("tpkind=gathered", "tpkind=megatron or cp=1")),
    ("cp=2,cpkind=ulyses", 2, 12, ("did you mean ulysses?", "ring, ulysses, allgather")),
    ("cp=2,zero=1,shard=3", 2, 12, ("shard=3 does not divide dp x cp = 2", "valid: 2")),
)


@pytest.fixture
def no_ranks(monkeypatch, tmp_path):
    """Starting ranks fails the test."""

    def started(*_: object, **__: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("shardwise.runtime.job.restart.supervise", started)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words to learn from\n" * 100)


@pytest.mark.parametrize(("layout", "ranks", "seq", "words"), CASES)
def test_estimate_and_train_say_what_is_valid(command, no_ranks, layout, ranks, seq, words):
    model = catalog.get("tiny-llama")
    assert (model.heads, model.kv_heads) == (8, 4)
    shape = ("tiny-llama", "--layout", layout, "--seq", seq, "--batch", 1)
    mistake(command("estimate", *shape, "--cluster", f"{ranks}xH100"), *words)
    mistake(command("train", *shape, "--data", "text.txt", "--out", "run"), *words)
    assert not Path("run").exists()


def test_a_cluster_of_another_size_is_named(command, no_ranks):
    shape = ("tiny-llama", "--layout", "tp=2,cp=2", "--seq", 64, "--batch", 1)
    mistake(command("estimate", *shape, "--cluster", "6xH100"), "dp x tp x pp x cp = 4 ranks", "there are 6")


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("cp=3", ("cp=3 does not divide", "valid cp: 1, 2, 4, 8, 16")),
        ("cp=2,cpkind=ulysses", ("cpkind=ulysses is for training", "leave it out")),
        ("cp=2,cpkind=allgather", ("cpkind=allgather is for training",)),
        ("cp=2,dp=2,zero=3", ("weights are gathered without cp=2", "zero=0")),
        ("cp=2,tp=2,sp", ("leave sp out",)),
        ("cp=16", ("needs 16 ranks", "8 devices")),
    ],
)
def test_generation_says_what_does_not_apply(command, layout, words):
    mistake(command("generate", "llama-3-8b", "--compare", layout, "--cluster", "8xH100"), *words)
