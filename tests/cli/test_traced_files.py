"""What commands make of the file of a traced module."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cases import table
from harness.command_line import mistake
from harness.forked import context
from shardwise.layout import Layout
from shardwise.runtime import dryrun
from shardwise.runtime.module.class_model import ClassModel

Command = Callable[..., tuple[int, str, str]]

CODE = table(__file__, "CODE")


def answered(command: Command, *words: object) -> Any:
    code, out, err = command(*words, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """code/net.py and traces/net.json, moved since the trace."""
    from shardwise.cli.main import main

    first = tmp_path_factory.mktemp("own") / "here"
    for inner in ("code", "traces"):
        (first / inner).mkdir(parents=True)
    (first / "code" / "net.py").write_text(CODE)
    words = ["--loss", "loss", "--tp", "1,2", "--plan", "*.0=column,*.2=row", "--blocks", "0,1,2", "--json"]
    assert main(["trace", f"{first}/code/net.py:build", *words, "--out", f"{first}/traces/net.json"]) == 0
    return first.rename(first.with_name("elsewhere"))


LAYOUT = "dp=32,tp=2,zero=2,micro=2"


def estimate(folder: Path, *more: str) -> list[str]:
    trace = folder / "traces" / "net.json"
    return ["estimate", str(trace), "--cluster", "8x8xH100", "--batch", "256", "--layout", *more]


def test_a_dry_run_builds_what_the_trace_names(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dryrun, "multiprocessing", SimpleNamespace(get_context=lambda kind: context()))
    predicted, observed = (
        answered(command, *estimate(folder, LAYOUT, *more))["roles"][0] for more in ([], ["--dry-run"])
    )
    assert observed["ledger"] == predicted["ledger"]
    for name in ("parameters", "gradients", "optimizer", "saved", "comm"):
        assert observed["bytes"][name] == predicted["bytes"][name]
    # A layout that `split` runs and a trace has no numbers for.
    assert answered(command, *estimate(folder, f"{LAYOUT},compile=block"), "--dry-run")["source"] == "dry-run"


def test_a_dry_run_without_the_code_says_why(command: Command, folder: Path, tmp_path: Path) -> None:
    data = json.loads((folder / "traces" / "net.json").read_text())
    (tmp_path / "traces").mkdir()
    trace = tmp_path / "traces" / "net.json"
    trace.write_text(json.dumps(data))
    mistake(command(*estimate(tmp_path, LAYOUT, "--dry-run")), "net.py, which is not there: trace it again")
    mistake(
        command(*estimate(tmp_path, LAYOUT, "--seq", "5", "--dry-run")), "has rows of 1 elements, not 5: choose --seq 1"
    )
    data["trace"]["source"] = None
    trace.write_text(json.dumps(data))
    mistake(command(*estimate(tmp_path, LAYOUT, "--dry-run")), "this file does not name the code of its module")


WORDS = {"deepspeed": '"stage": 3', "accelerate": "fsdp_transformer_layer_cls_to_wrap: Sequential"}


@pytest.mark.parametrize(("engine", "word"), WORDS.items())
def test_engines_that_leave_the_model_to_code_get_files(command: Command, folder: Path, engine: str, word: str) -> None:
    trace = folder / "traces" / "net.json"
    code, out, err = command("emit", trace, "--layout", "dp=8,zero=3,micro=2", "--batch", "64", "--for", engine)
    assert (code, err) == (0, "") and word in out
    emitted = answered(command, "plan", trace, "--cluster", "8xH100", "--batch", "64", "--emit", engine)["emitted"]
    assert emitted["engine"] == engine and emitted["text"]


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "fsdp2", "torchrun", "vllm"])
def test_engines_that_describe_models_say_who_does_not(command: Command, folder: Path, engine: str) -> None:
    batch = ["--prompt", "64", "--output", "64", "--concurrency", "8"] if engine == "vllm" else ["--batch", "64"]
    outcome = command("emit", folder / "traces" / "net.json", "--layout", "dp=8", *batch, "--for", engine)
    mistake(outcome, "its file describes a model", "choose deepspeed or accelerate")


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Starcoder-2, which no decoder here computes."""
    folder = tmp_path_factory.mktemp("class")
    model = ClassModel({"model_type": "starcoder2"}, "starcoder2").small(Layout(tp=2))
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    return folder


def test_a_configuration_is_traced_by_its_class(
    command: Command, configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dryrun, "multiprocessing", SimpleNamespace(get_context=lambda kind: context()))
    trace = configuration / "trace.json"
    made = answered(command, "trace", configuration, "--seq", "16", "--tp", "1,2", "--out", trace)
    assert made["tp"] == [1, 2] and made["seq"] == 16 and made["pipelines"]
    for layout in ("dp=4,tp=2,zero=3,micro=2", "dp=4,pp=2,micro=2"):
        words = ["--layout", layout, "--cluster", "8xH100", "--batch", "16"]
        predicted, observed, itself = (
            answered(command, "estimate", *asked, *words)["roles"]
            for asked in ([trace], [trace, "--dry-run"], [configuration, "--seq", "16", "--dry-run"])
        )
        for said, seen, direct in zip(predicted, observed, itself, strict=True):
            assert said["ledger"] == seen["ledger"] == direct["ledger"]
            assert seen["bytes"] == direct["bytes"] and said["bytes"]["saved"] == seen["bytes"]["saved"]


def test_a_dry_run_of_code_that_has_changed_says_so(command: Command, folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    (moved / "code" / "net.py").write_text(CODE.replace("range(3)", "range(4)"))
    sys.modules.pop("_shardwise_net", None)
    code, out, err = command(*estimate(moved, LAYOUT, "--dry-run"))
    assert (code, out) == (2, "") and err.endswith("its code has changed since it was traced: trace it again\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora", "rank=4"], "--lora changes what was traced"),
        (["--isolate-documents"], "--isolate-documents changes what was traced"),
        (["--optimizer", "muon", "--dry-run"], "muon"),
        (["--cluster", "4xH100", "--dry-run"], "there are 4"),
    ],
)
def test_what_a_trace_has_not_is_one_line(command: Command, folder: Path, options: list[str], message: str) -> None:
    mistake(command(*estimate(folder, LAYOUT, *options)), message)


def test_options_of_files_are_no_options_of_configurations(command: Command, configuration: Path, folder: Path) -> None:
    mistake(command("trace", configuration, "--loss", "loss"), "--loss is for FILE.py:NAME")
    mistake(command("trace", folder / "code" / "net.py:build", "--seq", "8"), "--seq is for a configuration")


def test_a_traced_configuration_is_planned_and_trained(
    command: Command, ranks_command: Command, configuration: Path, tmp_path: Path
) -> None:
    trace = configuration / "trained.json"
    answered(command, "trace", configuration, "--seq", "16", "--tp", "1", "--out", trace)
    words = ["--layout", "dp=8,zero=3,micro=2", "--batch", "64", "--for", "transformers"]
    assert "fsdp_size" in answered(command, "emit", trace, *words)["text"]
    code, out, err = command("plan", trace, "--cluster", "4xH100", "--batch", "8")
    assert (code, err) == (0, "") and f"shardwise train {trace}" in out.replace(" \\\n     ", "")
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 400)
    text = ["--data", tmp_path / "text.txt", "--vocab", "300"]
    words = ["--layout", "dp=2,zero=1", *text, "--seq", "16", "--batch", "4"]
    result = answered(ranks_command, "train", trace, *words, "--steps", "2", "--out", tmp_path / "run", "--report")
    assert result["steps"] == 2
    assert "Starcoder2" in json.loads((tmp_path / "run" / "reports" / "predicted.json").read_text())["model"]["name"]
