"""Dialogues, preference pairs and distillation by `train`: equal to a loop over single dialogues on one device."""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import forked
from harness.cases import from_table
from harness.dialogues import SETTINGS, chats, pairs, plain_losses, write_chat_model, write_records, write_tokenizer
from harness.pool import run_ranks
from shardwise.data import Corpus
from shardwise.layout import Layout
from shardwise.runtime.module.class_model import ROUNDED, ClassModel
from shardwise.runtime.module.class_run import REFERENCE
from shardwise.runtime.module.experts import use_exact_products

STEPS, BATCH = 3, 4
RUN = (
    f"--batch {BATCH} --no-tensorboard --lr {SETTINGS.lr} --warmup 0 --weight-decay 0 --clip 0 --tokenizer tok".split()
)
pytestmark = pytest.mark.usefixtures("leftovers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """chat.jsonl, pairs.jsonl, tok/, and weights in llama/, olmoe/ and teacher/."""
    made = tmp_path_factory.mktemp("tuning")
    write_tokenizer(made / "tok", chats(30))
    write_records(made / "chat.jsonl", chats(60))
    write_records(made / "pairs.jsonl", pairs(40))
    for seed, (name, kind) in enumerate({"llama": "llama", "olmoe": "olmoe", "teacher": "llama"}.items()):
        write_chat_model(made / name, kind, seed)
    return made


def shardwise(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return forked.shardwise(*words, environment={"OMP_NUM_THREADS": "1"}, timeout=240, folder=folder)


def trained(folder: Path, out: Path, *words: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a run."""
    done = shardwise("train", *words, *RUN, "--out", str(out), folder=folder)
    assert done.returncode == 0, done.stderr
    return events(out)


def events(out: Path) -> list[tuple[float, float]]:
    lines = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    return [(event["loss"], event["grad_norm"]) for event in lines if "grad_norm" in event]


def corpus_of(out: Path) -> Corpus:
    return Corpus.open(Path(json.loads((out / "run.json").read_text())["config"]["corpus"]))


def module_of(folder: Path) -> Any:
    data = json.loads((folder / "config.json").read_text())
    module = ClassModel(data, folder.name).pretrained(folder).double()
    use_exact_products(module)
    return module


@from_table
def test_a_loss_is_that_of_single_dialogues_on_one_device(folder, tmp_path, model, loss, layout):
    """Losses and gradient norms of three steps in float64, with packed rows and unequal answers."""
    kind, data, seq = loss.partition(",")[0], "pairs" if loss == "dpo" else "chat", 96
    words = ["--weights", model, "--data", f"{data}.jsonl", "--loss", loss, "--seq", str(seq), "--steps", str(STEPS)]
    result = trained(folder, tmp_path / "run", *words, "--layout", f"{layout},precision=fp64")
    module = module_of(folder / model)
    second = copy.deepcopy(module) if kind == "dpo" else module_of(folder / "teacher") if kind == "distill" else None
    plain = plain_losses(module, corpus_of(tmp_path / "run"), seq, BATCH, STEPS, kind=kind, second=second)
    np.testing.assert_allclose(result, plain, rtol=ROUNDED)  # norms of both classes compute in fp32


def test_the_reference_of_adapters_is_the_base_and_outlives_a_run(folder, tmp_path):
    """Four steps of DPO equal two and two more under another layout, with LoRA and without."""
    words = ["--weights", "llama", "--data", "pairs.jsonl", "--seq", "96"]
    for name, more in (("lora", ["--lora", "rank=4"]), ("whole", [])):
        run, other = tmp_path / name, tmp_path / f"{name}-resumed"
        layout = "dp=2,zero=3,precision=fp64"
        straight = trained(folder, run, *words, *more, "--steps", "4", "--save-every", "2", "--layout", layout)
        assert straight[0][0] == pytest.approx(np.log(2), rel=1e-12) and straight[3][0] < straight[0][0]
        again = [
            "--resume",
            str(run / "checkpoints" / "step-2"),
            "--layout",
            "tp=2,precision=fp64",
            "--out",
            str(other),
        ]
        done = shardwise("train", *again, folder=folder)
        assert done.returncode == 0, done.stderr
        assert events(other) == [pytest.approx(pair, rel=ROUNDED) for pair in straight[2:]]
    (run / "reference.json").unlink()
    done = shardwise("train", *again[:-1], str(tmp_path / "third"), folder=folder)
    assert done.returncode == 2 and "no reference of these pairs" in done.stderr, done.stderr


def test_a_reference_on_one_nodes_disk_is_every_ranks(tmp_path):
    for rank, about in enumerate(("the same", "another")):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / REFERENCE).write_text(json.dumps({"train": [float(rank)], "about": about}))
    made = run_ranks("harness.dialogues:kept_on_disks", 2, tmp_path)
    assert made == [{"train": [0.0], "about": "the same"}] * 2


def test_dialogues_share_no_row_where_the_class_would_see_the_one_before(folder, tmp_path):
    """Of a class with a recurrent state: said, and equal under two layouts."""
    config = ClassModel({"model_type": "qwen3_next"}, "n").small(Layout.parse("tp=2")).config.to_dict()
    (tmp_path / "n.json").write_text(json.dumps({**config, "vocab_size": 300}))
    words = [str(tmp_path / "n.json"), "--data", "chat.jsonl", "--seq", "64", "--steps", "2"]
    alone, two = (trained(folder, tmp_path / dp, *words, "--layout", f"dp={dp},precision=fp64") for dp in "12")
    assert two == [pytest.approx(pair, rel=ROUNDED) for pair in alone]
    done = shardwise("train", *words, *RUN, "--isolate-documents", "--layout", "dp=1", "--out", str(tmp_path / "three"),
                     folder=folder)  # fmt: skip
    assert "one in a row, padded" in done.stderr, done.stderr


@from_table
def test_what_a_loss_cannot_do_is_one_line_and_code_2(folder, tmp_path, words, message):
    (tmp_path / "plain.txt").write_text("text " * 2000)
    write_records(tmp_path / "bad.jsonl", [{"messages": [{"role": "user"}]}] * 3)
    given = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in words.split()]
    out = ["--out", str(tmp_path / "run")]
    done = shardwise("train", "llama/config.json", "--seq", "64", "--batch", "4", *given, *out, folder=folder)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
