"""Emitted programs of plain PyTorch: they train on gloo, with our losses and the bytes of our communication ledger."""

import ast
import json
import os
import re
import socket
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.torch import load_file

from harness import forked
from harness.cases import table
from harness.emitted import requests
from harness.emitted_program import LEDGER_OPS
from harness.huggingface import pretrained
from harness.pool import run_ranks
from harness.today import some_of
from shardwise.cluster import Cluster
from shardwise.data import Sampler
from shardwise.interop import WriteRequest, write
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import resolve
from shardwise.predict import estimate
from shardwise.report.step_report import DTYPE_BYTES

STEPS, LIMIT = 3, 180
STANDS_ON = {"argparse", "contextlib", "functools", "json", "math", "numpy", "torch", "transformers"}
"""Packages that a program imports: none of ours."""
WORK = Workload(seq=16, batch=8)
PROGRAMS = table(__file__, "PROGRAMS")


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Family -> (Hugging Face folder, folder of tokens, losses of one device)."""
    folder = tmp_path_factory.mktemp("programs")
    return partial(_start, folder, {})


def _start(folder: Path, made: dict[str, tuple[Path, str, list[float]]], family: str) -> tuple[Path, str, list[float]]:
    if family not in made:
        text, weights, out = folder / "text.txt", folder / family, folder / f"run-{family}"
        text.write_text("\n".join(f"line {n} holds {n * n}" for n in range(4000)))
        wide = {"n_layer": 3} if family == "gpt2" else {"intermediate_size": 48, "num_hidden_layers": 3}
        pretrained(family, vocab_size=304, **wide).save_pretrained(weights)
        tokenizer = tokenizers.ByteLevelBPETokenizer()
        tokenizer.train([str(text)], vocab_size=304, special_tokens=["<|endoftext|>"])
        tokenizer.save(str(weights / "tokenizer.json"))
        done = forked.shardwise(
            "train", "--weights", str(weights), "--data", str(text), "--seq", f"{WORK.seq}", "--batch", f"{WORK.batch}",
            "--steps", f"{STEPS}", "--layout", "precision=fp32", "--out", str(out), "--no-tensorboard",
            environment=os.environ, timeout=LIMIT,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        events = [json.loads(line) for line in (out / "events.jsonl").open()]
        corpus = json.loads((out / "run.json").read_text())["config"]["corpus"]
        made[family] = weights, corpus, [event["loss"] for event in events if "loss" in event]
    return made[family]


def _run(engine: str, text: str, start: tuple[Path, str, list[float]], folder: Path, *more: str):
    """(predicted bytes by operation, losses, bytes by operation) of an emitted program."""
    weights, corpus, _ = start
    model, layout = resolve(str(weights)), Layout.parse(text)
    file = write(engine, WriteRequest(model, layout, WORK, source=str(weights)))
    path = folder / file.file
    path.write_text(file.text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--corpus", corpus, "--steps", f"{STEPS}", *more]
    losses, sent = run_ranks("harness.emitted_program:run", layout.ranks, (str(path), arguments, port), LIMIT)[0]
    predicted: Counter[str] = Counter()
    report = estimate(model, file.layout, WORK, Cluster.parse(f"{layout.ranks}xcpu"))
    for row in (row for row in report.roles[0].ledger if row.op in LEDGER_OPS.values()):
        predicted[row.op] += row.elements * DTYPE_BYTES[row.dtype] * row.count * STEPS
    return dict(predicted), losses, {op: sent[op] for op in predicted}


@pytest.mark.parametrize(("engine", "family", "text"), some_of(PROGRAMS, 2, "emitted programs"))
def test_a_program_has_our_losses_and_our_ledger(engine, family, text, started, tmp_path):
    start = started(family)
    predicted, losses, sent = _run(engine, f"{text},precision=fp32", start, tmp_path)
    assert losses == pytest.approx(start[2], rel=1e-6)
    assert sent == predicted


def test_a_program_in_half_precision_sends_our_bytes(started, tmp_path):
    start = started("llama")
    predicted, losses, sent = _run("fsdp2", "dp=2,zero=3", start, tmp_path)
    assert losses == pytest.approx(start[2], rel=0.02) and losses != pytest.approx(start[2], rel=1e-6)
    assert sent == predicted


def test_a_program_saves_what_it_has_trained(started, tmp_path):
    start = started("llama")
    _run("fsdp2", "dp=2,zero=3,precision=fp32", start, tmp_path, "--save", str(tmp_path / "saved"))
    before, after = (load_file(path / "model.safetensors") for path in (start[0], tmp_path / "saved"))
    assert before.keys() == after.keys()
    moved = [(before[name] - after[name]).abs().max().item() for name in before]
    assert min(moved) > 0 and max(moved) < 1e-3


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_every_program_is_short_and_valid(engine):
    for _, request in requests(engine, 40, "programs"):
        text = write(engine, request).text
        ast.parse(text)
        assert "#if" not in text and "#end" not in text and "import shardwise" not in text
        assert {one.split(".")[0] for one in re.findall(r"^(?:from|import) (\S+)", text, re.MULTILINE)} <= STANDS_ON
        assert len([line for line in text.splitlines() if line.strip()]) < (154 if request.layout.tp > 1 else 130)


def test_a_programs_windows_are_those_of_training():
    text = write("ddp", WriteRequest(resolve("llama-3-8b"), Layout(dp=2), WORK)).text
    body = text[text.index("def window(") : text.index("def learning_rate(")]
    exec(body, names := {})
    for count in (1, 2, 3, 7, 64, 1000, 12345):
        sampler = Sampler(np.zeros(count * 8 + 1, np.uint16), 8, seed=0)
        ours = [int(one) for one in sampler.window(np.arange(3 * min(count, 200)))]
        assert [names["window"](index, count) for index in range(len(ours))] == ours
