"""Words of command lines and shell scripts: which value belongs to which flag."""

import pytest

from harness.cases import from_table
from shardwise.errors import UserError
from shardwise.interop import read
from shardwise.interop.reading.arguments import launched_ranks, parse
from shardwise.interop.reading.shell import commands

SHORT = {"-tp": "tensor_parallel_size"}
ALONE = frozenset({"bf16", "enforce_eager"})


def split(text):
    return [word for command in commands(text) for word in command.words]


def flags(text):
    return parse(split(text), SHORT, ALONE).flags


def test_every_way_to_write_a_value():
    assert flags("run -tp 4 --seq-length=8192 --max_model_len 32k --lr -1e-4 --loss-scale -1") == {
        "tensor_parallel_size": "4",
        "seq_length": "8192",
        "max_model_len": "32k",
        "lr": "-1e-4",
        "loss_scale": "-1",
    }


def test_a_flag_that_stands_alone_takes_no_word():
    found = parse(split("serve --enforce-eager meta-llama/X --bf16 4"), SHORT, ALONE)
    assert found.flags == {"enforce_eager": True, "bf16": True}
    assert found.words == ("serve", "meta-llama/X", "4")


def test_the_last_value_counts_and_several_are_a_list():
    assert flags("--seq 1 --seq 2")["seq"] == "2"
    assert flags("--data-path 0.5 a 0.5 b")["data_path"] == ["0.5", "a", "0.5", "b"]


def test_a_script_s_variables_and_arrays_are_filled_in():
    script = """#!/bin/bash
    TP=${TP:-8}   # inside a node
    GPUS=${GPUS:-8}
    ARGS=(
        --tensor-model-parallel-size $TP
        --seq-length ${TP}192 )
    ARGS+=("--lr-decay-style cosine")
    MORE="--global-batch-size 512 \\
        --lr 3e-4"
    torchrun --nproc_per_node 8 train.py ${ARGS[@]} $MORE
    """
    found = flags(script)
    assert found["tensor_model_parallel_size"] == "8" and found["seq_length"] == "8192"
    assert found["lr_decay_style"] == "cosine"
    assert found["global_batch_size"] == "512" and found["lr"] == "3e-4"


@from_table
def test_what_comes_after_an_array_is_no_value(text):
    assert flags(text)["context_parallel_size"] == "2"


def test_options_that_no_command_uses_are_not_its_own():
    assert "context_parallel_size" not in flags("A=(--context-parallel-size 2)\ntorchrun x.py")


@from_table
def test_processes_that_are_launched(text, ranks):
    assert launched_ranks(flags(text)) == ranks


def test_an_open_quote_is_one_line():
    with pytest.raises(UserError, match="no closing quotation"):
        split('--name "open')


FOLDERS = ["`pwd`", "$(pwd)", "${PWD}", "$(dirname $0)", '"$(dirname "$(realpath "$0")")"', "${0%/*}", "$UNSET",
           '$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd )']  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_in_the_folder_of_a_script(tmp_path, folder):
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}')
    script = tmp_path / "run.sh"
    for text in (
        "deepspeed --num_gpus 4 main.py --deepspeed {0}",
        "D={0}\ndeepspeed --num_gpus 4 main.py --deepspeed $D",
    ):
        script.write_text(text.format(f"{folder}/ds.json"))
        assert read([str(script)]).layout.stage == 2


@pytest.mark.parametrize("name", ["env.sh", "./env.sh", '"$(dirname "$0")/env.sh"', "${HERE}/env.sh", "more/env.sh"])
@pytest.mark.parametrize("word", ["source", "."])
def test_files_that_a_script_sources(tmp_path, word, name):
    (tmp_path / "more").mkdir()
    for folder in (tmp_path, tmp_path / "more"):
        (folder / "env.sh").write_text("source env.sh\nexport TP=4 # TP=8\nif true; then PP=2; fi\n")
    script = "TP=1\n{} {}\ntorchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size $TP {}\n"
    (tmp_path / "train.sh").write_text(script.format(word, name, "--pipeline-model-parallel-size $PP"))
    found = read([str(tmp_path / "train.sh")])
    assert (found.layout.tp, found.layout.pp, found.layout.dp) == (4, 2, 1)
    (tmp_path / "train.sh").write_text(script.format(word, "gone.sh", ""))
    assert read([str(tmp_path / "train.sh")]).layout.tp == 1
