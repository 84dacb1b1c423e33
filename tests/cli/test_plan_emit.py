"""`plan --emit`: the best layout that an engine expresses, as its file."""

import json

import pytest

from shardwise.interop import read

TRAIN = ("plan", "llama-3-8b", "--cluster", "8xH100", "--seq", 4096, "--batch", 64)
SERVE = ("plan", "llama-3-8b", "--cluster", "8xH100", "--serve", "--prompt", 1024, "--output", 256, "--concurrency", 64)


def test_the_winner_is_written(command, tmp_path):
    path = tmp_path / "train.sh"
    code, out, _ = command(*TRAIN, "--emit", "torchrun", "--out", path, "--json")
    data = json.loads(out)
    assert code == 0 and data["emitted"]["why_not_the_best"] is None
    assert data["emitted"]["layout"] == data["ranked"][0]["layout"] == str(read([str(path)]).layout)


def test_another_layout_is_written_where_the_winner_cannot_be(command, tmp_path):
    path = tmp_path / "ds.json"
    asked = (*TRAIN, "--fix", "zero=1,tp=2", "--emit", "deepspeed", "--out", path, "--top", 200)
    code, out, err = command(*asked)
    assert code == 0, err
    words = " ".join(out.split())
    assert "the best layout cannot be written: DeepSpeed cannot express" in words and "written in its place:" in words
    assert read([str(path)], 8).layout.tp == 2


def test_a_server_is_written(command):
    code, out, err = command(*SERVE, "--emit", "sglang", "--json")
    data = json.loads(out)
    assert code == 0, err
    best = data["ranked"][0]
    assert f"--max-running-requests {best['sequences_of_a_replica']}" in data["emitted"]["text"]


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ((*TRAIN, "--emit", "vllm"), "--emit vllm: vLLM serves; add --serve"),
        ((*SERVE, "--emit", "megatron"), "--emit megatron: Megatron-LM trains; leave out --serve"),
        ((*TRAIN, "--emit", "none"), "no engine 'none'"),
        ((*SERVE, "--out", "x"), "--out writes a training plan, or the file of --emit"),
        ((*TRAIN, "--find", "model", "--emit", "megatron"), "leave it out with --find"),
        ((*TRAIN, "--fix", "tp=2,pp=2,cp=2", "--emit", "accelerate"), "best layouts can be written (more with --top)"),
        ((*TRAIN, "--set", "layers=4", "--emit", "torchtitan"), "which --set changes"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(command, asked, line):
    code, _, err = command(*asked)
    assert code == 2 and line in err and err.count("\n") == 1
