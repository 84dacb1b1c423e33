"""The adapters' commands in a row: train, resume under another layout, compare, export, merge; and their mistakes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from harness import forked
from harness.cases import from_table
from shardwise.checkpoint import Checkpoint

TEXT = ("--data", "stdlib", "--max-bytes", "200000", "--seq", "32", "--batch", "4", "--validate-batches", "1")
FULL = "precision=fp32"


def shardwise(*words: object, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = forked.shardwise(*map(str, words), environment={**clean, "OMP_NUM_THREADS": "1"}, timeout=300, folder=folder)
    assert done.returncode == code, (words, done.stderr)
    return done


def result(*words: object, folder: Path) -> Any:
    return json.loads(shardwise(*words, "--json", folder=folder).stdout)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights `base`, and a run `lora` of adapters that began at them."""
    folder = tmp_path_factory.mktemp("lora")
    plain = ("train", "tiny-llama", *TEXT, "--set", "layers=2,ffn=384", "--layout", FULL, "--no-tensorboard")
    shardwise(*plain, "--steps", 2, "--out", "whole", folder=folder)
    shardwise("checkpoint", "export", "whole", "--out", "base", "--dtype", "float32", folder=folder)
    lora = ("--weights", "base", *TEXT, "--lora", "rank=3,alpha=12", "--no-tensorboard")
    straight = ("train", *lora, "--layout", FULL, "--steps", 4, "--save-every", 2, "--lr", "1e-2")
    shardwise(*straight, "--report", "--out", "lora", folder=folder)
    return folder


@pytest.mark.parametrize("layout", ["tp=2", "dp=2,zero=3"])
def test_trap_35_a_resumed_run_has_its_base(root: Path, layout: str) -> None:
    words = ("train", "--resume", "lora/checkpoints/step-2", "--layout", f"{layout},{FULL}", "--steps", 4)
    resumed = result(*words, "--out", f"resumed-{layout}", folder=root)
    straight = json.loads((root / "lora" / "result.json").read_text())
    assert resumed["loss"] == pytest.approx(straight["loss"], rel=1e-5)
    assert resumed["validation_loss"] == pytest.approx(straight["validation_loss"], rel=1e-5)


def test_a_run_is_as_predicted(root: Path) -> None:
    compared = shardwise("compare", "lora", folder=root).stdout
    assert "bytes by class equal" in compared and "✗" not in compared


def test_trap_35_merged_weights_are_the_sum(root: Path) -> None:
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    result("checkpoint", "merge", "../lora", "--out", "../merged", "--dtype", "float32", folder=elsewhere)
    checkpoint = Checkpoint.open(root / "lora" / "checkpoints" / "step-4")
    before, after = (load_file(root / name / "model.safetensors") for name in ("base", "merged"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert len(moved) == 7 * 2 and all("_proj" in name for name in moved)
    a, b = (checkpoint.read(f"model/blocks.1.mlp.down.lora_{factor}", None, "float32") for factor in "ab")
    sum_of_products = 4 * b.reshape(-1, 3).astype(float) @ a.reshape(3, -1).astype(float)
    name = "model.layers.1.mlp.down_proj.weight"
    assert np.allclose(after[name] - before[name], sum_of_products, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(("base", "other"), [("int8", "tp=2"), ("nf4", "tp=2"), ("fp8", "dp=2,zero=3")])
def test_a_base_in_fewer_bits_is_read_again_and_merged(root: Path, base: str, other: str) -> None:
    """Under another layout, from step 2. Merging adds to the folder's own weights."""
    lora = ("train", "--weights", "base", *TEXT, "--lora", f"rank=3,alpha=12,base={base}", "--no-tensorboard")
    more = ("--steps", 4, "--save-every", 2, "--lr", "1e-2", "--report", "--out", base)
    straight = result(*lora, "--layout", FULL, *more, folder=root)
    compared = shardwise("compare", base, folder=root).stdout
    assert "bytes by class equal" in compared and "✗" not in compared
    words = ("train", "--resume", f"{base}/checkpoints/step-2", "--layout", f"{other},{FULL}", "--steps", 4)
    assert result(*words, "--out", f"{base}-2", folder=root)["loss"] == pytest.approx(straight["loss"], rel=1e-5)
    plain = json.loads((root / "lora" / "result.json").read_text())
    assert plain["loss"] != straight["loss"] and plain["loss"] == pytest.approx(straight["loss"], rel=0.01)
    result("checkpoint", "merge", base, "--out", f"{base}-wide", "--dtype", "float32", folder=root)
    before, after = (load_file(root / name / "model.safetensors") for name in ("base", f"{base}-wide"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert 0 < np.abs(after[name] - before[name]).max() < 0.1


def test_trap_35_pefts_folder_and_back(root: Path) -> None:
    made = result("checkpoint", "export", "lora", "--out", "adapters", folder=root)
    assert made["tensors"] == 7 * 2 * 2
    stored = load_file(root / "adapters" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert stored[key].shape[0] == 3 and stored[key].dtype == np.float32
    config = json.loads((root / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 12, str(root / "base"))
    alone = shardwise("generate", "adapters", "--prompt", "a", folder=root, code=2).stderr
    assert "adapters alone: `checkpoint merge`" in alone
    result("checkpoint", "merge", "adapters", "--base", "base", "--out", "again", "--dtype", "float32", folder=root)
    result("checkpoint", "merge", "lora", "--out", "once", "--dtype", "float32", folder=root)
    assert (root / "again" / "model.safetensors").read_bytes() == (root / "once" / "model.safetensors").read_bytes()
    # Training continues from them: its first validation is the last one of the run that wrote them.
    words = ("train", "--weights", "base", *TEXT, "--lora", "adapters", "--layout", f"dp=2,zero=1,{FULL}")
    more = result(*words, "--no-tensorboard", "--steps", 1, "--out", "more", folder=root)
    straight = json.loads((root / "lora" / "result.json").read_text())
    assert more["first_validation_loss"] == pytest.approx(straight["validation_loss"], rel=1e-5)
    words = ("estimate", "base", "--cluster", "1xA100", "--seq", "8", "--batch", "1", "--layout", "dp=1", "--lora")
    wide, narrow = (result(*words, lora, folder=root) for lora in ("adapters", "adapters,base=int8"))
    held, less = (found["roles"][0]["bytes"]["parameters"] for found in (wide, narrow))
    assert less < held


def test_a_dropout_that_is_left_out_is_said_once_by_each_command(root: Path) -> None:
    result("checkpoint", "export", "lora", "--out", "dropped", folder=root)
    path = root / "dropped" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.25}))
    estimate = ("estimate", "base", "--cluster", "1xA100", "--seq", "8", "--batch", "1", "--layout", "dp=1")
    plan = ("plan", "base", "--cluster", "1xA100", "--seq", "8", "--batch", "1")
    train = ("train", "--weights", "base", *TEXT, "--no-tensorboard", "--steps", 1, "--out", "without")
    for words in (estimate, plan, train):
        done = shardwise(*words, "--lora", "dropped", "--json", folder=root)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("dropped has lora_dropout=0.25: it trains without it") == 1, done.stderr


@from_table
def test_mistakes_are_one_line(root: Path, words: tuple[str, ...], message: str) -> None:
    done = shardwise(*words, folder=root, code=2)
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr
