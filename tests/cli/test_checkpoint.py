"""`shardwise checkpoint`: results on standard output, one line for every mistake, exit codes."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from harness.command_line import mistake
from shardwise.checkpoint import Manifest, PartEntry, TensorSpec, commit, shapes, write_part, writes
from shardwise.layout import Layout
from shardwise.model import ModelConfig

SMALL = ModelConfig("small", vocab=23, hidden=16, layers=1, heads=2, ffn=10, max_positions=16)
KINDS = ("model", "first", "second")


def save(folder: Path, step: int) -> None:
    """A checkpoint of two tensor-parallel ranks with values of its own."""
    rng = np.random.default_rng(step)
    state = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes(SMALL, KINDS).items()}
    records = []
    for rank in range(2):
        held = [(f"{kind}/{h.name}", h) for kind in KINDS for h in writes(SMALL, Layout(tp=2), rank)]
        entries = [PartEntry(name, TensorSpec(h.shape, "float32"), h.stored) for name, h in held]
        boxes = [state[name][tuple(slice(*run) for run in h.stored.box)].reshape(-1) for name, h in held]
        arrays = [box[h.stored.first : h.stored.last] for box, (_, h) in zip(boxes, held, strict=True)]
        records.append(write_part(folder / f"step-{step}", rank, entries, arrays))
    about = {"model": SMALL.to_json(), "layout": "tp=2"}
    manifest = Manifest.of(records, step=step, samples=4 * step, seed=3, optimizer_steps=step, about=about)
    commit(folder / f"step-{step}", manifest)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    for step in (1, 2):
        save(folder / "checkpoints", step)
    return folder


@pytest.fixture
def command(command):
    return partial(command, "checkpoint")


def test_inspect(command, run):
    code, out, _ = command("inspect", run, "--tensors")
    assert code == 0
    for words in ("step 2", "8 samples", "small", "tp=2", "rank-00001.safetensors", "second: ", "23 x 16", "float32"):
        assert words in out
    code, out, _ = command("inspect", run / "checkpoints" / "step-1", "--json")
    data = json.loads(out)
    assert (code, data["step"], data["about"]["layout"], len(data["files"])) == (0, 1, "tp=2", 2)
    assert data["tensors"]["model/head.norm.weight"] == {"shape": [16], "dtype": "float32"}


def test_json_may_stand_before_the_action(command, run):
    code, out, _ = command("--json", "inspect", run)
    assert code == 0 and json.loads(out)["step"] == 2


def test_verify(command, run):
    code, out, _ = command("verify", run)
    assert code == 0 and "every checksum is correct" in out
    assert json.loads(command("verify", run, "--json")[1])["whole"] is True
    path = run / "checkpoints" / "step-2" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    older = f"train --resume {path.parents[1] / 'step-1'} --out NEW_RUN"
    mistake(command("verify", run), "rank-00001.safetensors is damaged", older)
    path.write_bytes(data[:-1])
    mistake(command("verify", run), "rank-00001.safetensors has")
    assert json.loads(command("verify", path.parents[1] / "step-1", "--json")[1])["step"] == 1


def test_reshard_and_diff(command, run, tmp_path):
    out_folder = tmp_path / "resharded"
    code, out, _ = command("reshard", run, "--layout", "dp=3,zero=1", "--out", out_folder)
    assert code == 0 and "step 2 under dp=3,zero=1, 3 files" in out
    code, out, _ = command("diff", run, out_folder)
    assert code == 0 and "equal bit by bit" in out
    assert json.loads(command("diff", run, out_folder, "--json")[1])["equal"] is True
    code, out, err = command("diff", run / "checkpoints" / "step-1", out_folder)
    assert code == 1 and "tensors differ" in out and not err
    code, out, _ = command("diff", run / "checkpoints" / "step-1", out_folder, "--json")
    data = json.loads(out)
    assert code == 1 and len(data["differences"]) == len(shapes(SMALL, KINDS))
    data = json.loads(command("reshard", run, "--layout", "tp=2", "--out", tmp_path / "other", "--json")[1])
    assert data["files"] == 2 and data["layout"] == "tp=2"


def test_mistakes(command, run, tmp_path):
    mistake(command("reshard", run, "--layout", "tp=5", "--out", tmp_path / "x"), "tp=5 does not suit")
    mistake(command("reshard", run, "--layout", "tpp=5", "--out", tmp_path / "x"), "did you mean tp?")
    mistake(command("reshard", run, "--layout", "tp=2", "--out", run), "is not empty")
    (run / "checkpoints" / "step-2" / "manifest.json").write_text("{}")
    mistake(command("verify", run / "checkpoints" / "step-2"), "manifest.json is damaged")
    assert not (tmp_path / "x").exists()
