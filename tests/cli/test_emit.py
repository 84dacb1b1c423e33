"""`shardwise emit`: files that `explain` reads back, the JSON, and what is rejected."""

import json

import pytest

MODEL = ("llama-3-8b", "--layout")
TRAIN = ("--seq", 4096, "--batch", 64)
SERVE = ("--prompt", 1024, "--output", 256, "--concurrency", 100)


def test_a_file_that_explain_reads(command, tmp_path):
    path = tmp_path / "ds.json"
    code, out, _ = command("emit", *MODEL, "dp=8,zero=3,hpz=2,micro=2", *TRAIN, "--for", "deepspeed", "--out", path)
    assert code == 0 and str(path) in out and "start 8 ranks" in out
    code, out, _ = command("explain", path, "--ranks", 8, "--json")
    reading = json.loads(out)
    assert (reading["layout"], reading["batch"]) == ("dp=8,zero=3,hpz=2,micro=2", 64)


def test_a_server_for_its_clients(command, tmp_path):
    path = tmp_path / "serve.sh"
    asked = ("emit", *MODEL, "dp=2,tp=4", *SERVE, "--for", "vllm", "--weights", "my models/8b", "--out", path)
    code, out, _ = command(*asked, "--json")
    data = json.loads(out)
    assert code == 0 and data["text"] == path.read_text() and data["ranks"] == 8 and data["comments"] == []
    reading = json.loads(command("explain", path, "--json")[1])
    assert reading["model"] == "my models/8b" and reading["served"]["length"] == 1280
    assert reading["served"]["sequences"] == 50


def test_standard_output_is_the_file_alone(command):
    code, out, err = command("emit", *MODEL, "dp=16", *TRAIN, "--for", "megatron", "--cluster", "4x4xH100")
    assert code == 0 and not err and out.startswith("#!/usr/bin/env bash\n") and "--nnodes 4" in out


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "deepspeed", "accelerate", "transformers", "torchrun"])
def test_a_step_is_assumed_as_in_plan_and_forced_keys_are_replaced(command, tmp_path, engine):
    path = tmp_path / "file"
    asked = ("emit", *MODEL, "dp=8,zero=3,micro=2", "--for", engine, "--out", path, "--json")
    code, out, err = command(*asked)
    data = json.loads(out)
    assert code == 0, err
    assert any(comment.startswith("assumed --seq 8192") for comment in data["comments"])
    assert any(comment.startswith("assumed --batch 256") for comment in data["comments"])
    forced = engine in ("torchtitan", "accelerate", "transformers")
    assert ("grads=fp32" in data["layout"]) == forced
    assert any("grads=fp32 in place of bf16" in comment for comment in data["comments"]) == forced


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["dp=8", *TRAIN, "--for", "megatro"], "no engine 'megatro'; did you mean megatron?"),
        (["dp=8", *TRAIN, "--for", "vllm"], "vLLM serves: give --prompt"),
        (["dp=8", *SERVE, "--for", "megatron"], "Megatron-LM trains: give --seq"),
        (["dp=8", "--model", "gemma-2-9b", "--seq", 64, "--batch", 8, "--for", "megatron"], "express gemma-2-9b"),
        (["dp=8", "--model", "llama", "--for", "vllm"], "no model 'llama'"),
        (["dp=0", *TRAIN, "--for", "vllm"], "dp must be a positive integer"),
        (["cp=2", *TRAIN, "--for", "deepspeed"], "nearest that it can: cp=2,cpkind=ulysses"),
        (["dp=3", *TRAIN, "--for", "deepspeed"], "nearest that can: 63 or 66"),
        (["tp=2", *SERVE[:2], "--for", "vllm"], "a server needs --output, --concurrency, too"),
        (["tp=2", *SERVE, "--set", "layers=2", "--for", "vllm"], "loads the model by its name"),
        (["dp=8", *TRAIN, "--for", "deepspeed", "--out", "/none/x"], "cannot write /none/x"),
        (["--seq", 8, "--for", "deepspeed"], "argument --layout: expected one argument"),
        (["dp=8", *TRAIN, "--for", "deepspeed", "--engine-version", "1"], "no version '1' of DeepSpeed"),
        (["dp=8", *TRAIN, "--for", "torchrun", "--cluster", "4xH100"], "needs 8 ranks, but 4x"),
        (["dp=8", "--seq", 0, "--batch", 8, "--for", "deepspeed"], "--seq must be a positive"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_2(command, arguments, line):
    # The former order, emit LAYOUT --model MODEL, is accepted too.
    model = () if "--model" in arguments else MODEL
    code, out, err = command("emit", *model, *arguments)
    assert code == 2 and line in err and err.count("\n") == 1 and not out
