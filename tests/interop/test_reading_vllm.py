"""vLLM's arguments and YAML."""

import pytest

from harness.cases import from_table
from shardwise.errors import UserError
from shardwise.interop import ServerSettings, read


def test_a_whole_command():
    found = read(
        [
            "vllm serve meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size 4 -pp 2 --max-model-len 32k "
            "--max-num-seqs 128 --max-num-batched-tokens 8192 --gpu-memory-utilization 0.92 --kv-cache-dtype fp8 "
            "--quantization awq --port 8000 --served-model-name llama --enforce-eager --trust-remote-code"
        ]
    )
    assert (found.engine, str(found.layout)) == ("vLLM", "tp=4,pp=2")
    assert found.model == "meta-llama/Llama-3.1-70B-Instruct"
    assert found.served == ServerSettings("int4-g128z", "float8_e4m3fn", 32000, 128, 8192, 0.92)
    assert found.unknown == () and {"--port", "--served-model-name", "--trust-remote-code"} <= set(found.ignored)
    assert any("--enforce-eager" in note for note in found.notes)


def test_what_is_not_said_is_vllm_s_default():
    assert read(["vllm serve gpt2"]).served == ServerSettings("bfloat16", "", None, None, None, 0.9)


@from_table
def test_layouts(words, layout):
    assert str(read([f"vllm serve {words}"]).layout) == layout


def test_the_older_entry_point_and_words_apart():
    words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "gpt2", "-tp", "2"]
    found = read(words)
    assert (found.model, found.layout.tp) == ("gpt2", 2)


def test_yaml(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text("model: Qwen/Qwen3-8B\nport: 8000\ntensor-parallel-size: 2\nmax-model-len: 8192\n")
    found = read([str(path)])
    assert (found.model, found.layout.tp, found.served.length) == ("Qwen/Qwen3-8B", 2, 8192)


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("32k", 32_000), ("32K", 32_768), ("1.5k", 1500)])
def test_lengths(text, tokens):
    assert read([f"vllm serve x --max-model-len {text}"]).served.length == tokens


@from_table
def test_contradictions_are_one_line(words, line):
    with pytest.raises(UserError, match=line):
        read([f"vllm serve x {words}"], 8)


def test_an_unknown_quantisation_and_flag_are_said():
    found = read(["vllm serve x --quantization ternary --tensor-paralel-size 4"])
    assert any("ternary: the model's files say the width" in fact for fact in found.facts)
    assert found.unknown == ("--tensor-paralel-size (did you mean --tensor-parallel-size?)",)
