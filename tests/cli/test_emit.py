"""`shardwise emit`: files that `explain` reads back, the JSON, and what is rejected."""

import json
import subprocess

import pytest

from harness.cases import from_table

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
    assert code == 0 and data["text"] == path.read_text() and data["ranks"] == 8
    assert data["comments"] == ["its longest sequence, 1280 tokens, is a prompt and its answer"]
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


def test_a_server_has_its_files_precision_and_must_fit(command):
    code, _, err = command("emit", "deepseek-v3", "--layout", "tp=8", "--for", "vllm", "--cluster", "8xH200")
    assert code == 2 and "deepseek-v3 does not fit: 170 GB of weights" in err
    assert err.rstrip().endswith(
        "the files of deepseek-ai/DeepSeek-V3 are in fp8-block128x128: emit deepseek-ai/DeepSeek-V3"
    )
    stored = ("emit", "deepseek-ai/DeepSeek-V3", "--layout", "tp=8", "--for", "vllm", "--cluster", "8xH200")
    code, out, err = command(*stored)
    assert code == 0 and "--dtype auto" in out and "--quantization" not in out, err
    assert "# its longest sequence is the model's context, 163840 tokens" in out


def test_a_training_that_does_not_fit_says_so(command):
    # Gradients in bf16, as the file has them and explain counts them.
    fits = "# does not fit: 82.9 GB per device; 75.5 GB may be used on H100-80GB-SXM; plan --emit megatron"
    wide = (*MODEL, "dp=8,zero=1", "--batch", 64, "--cluster", "8xH100", "--for", "megatron")
    code, out, _ = command("emit", *wide)
    assert code == 0 and fits in out
    code, out, _ = command("emit", *MODEL, "dp=8,zero=3", *wide[3:])
    assert code == 0 and "does not fit" not in out


def test_servers_and_trainers_have_flags_of_their_own(command):
    code, _, err = command("emit", *MODEL, "tp=2", "--seq", 4096, "--for", "vllm")
    assert code == 2 and "vLLM serves: give --prompt and --output and --concurrency in place of --seq" in err
    code, _, err = command("emit", *MODEL, "tp=2", *SERVE, "--for", "megatron")
    assert code == 2 and "Megatron-LM trains: give --seq and --batch in place of --prompt" in err


@from_table
def test_a_job_starts_the_engine_on_all_nodes(command, tmp_path, monkeypatch, engine, layout, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(
        "emit", *MODEL, layout, "--for", engine, "--cluster", "2x8xH100", "--slurm", "--time", "60"
    )
    assert code == 0 and "start it with: sbatch shardwise.sbatch" in out, err
    text = (tmp_path / "shardwise.sbatch").read_text()
    assert f"' node {words}" in text and "#SBATCH --nodes=2" in text and "#SBATCH --time=60" in text
    # The job says which nodes there are.
    assert "HEAD_ADDRESS" not in text and "--nnodes 2" not in text and " ray" not in text
    assert ("CUDA_DEVICE_MAX_CONNECTIONS=1" in text) == (engine == "megatron")
    assert subprocess.run(["bash", "-n", "shardwise.sbatch"], check=False).returncode == 0
    file = {"fsdp2": "train_fsdp2.py", "accelerate": "accelerate.yaml", "deepspeed": "deepspeed.json"}.get(engine)
    assert {path.name for path in tmp_path.iterdir()} == {"shardwise.sbatch", "logs", *([file] if file else [])}


def test_a_job_needs_its_cluster(command):
    code, _, err = command("emit", *MODEL, "dp=8", "--for", "megatron", "--slurm")
    assert code == 2 and "--slurm needs --cluster" in err
    code, _, err = command("emit", *MODEL, "dp=8", "--for", "megatron", "--time", "60")
    assert code == 2 and "--time is for --slurm" in err
