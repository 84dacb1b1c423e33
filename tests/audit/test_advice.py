"""What `plan` would do in place of a recorded layout, and the settings of the program's engine."""

from __future__ import annotations

import pytest

from harness.cases import from_table
from shardwise.audit.advice import AdviceRequest, advice
from shardwise.audit.calls import Call
from shardwise.audit.reading import RankRecording
from shardwise.cli.main import main
from shardwise.layout import Layout
from shardwise.predict.arguments import as_cluster, as_model

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def lines(
    engine: str, layout: str, model: str | None = None, cluster: str = "2xH100", config: bool = True
) -> list[str]:
    calls = (Call(0, 0, "all_reduce", (0, 1), engine=engine),)
    one = RankRecording(0, calls, 2, model=("Net", 0, CONFIG if config else None, []))
    request = AdviceRequest(as_cluster(cluster), 2048, 64, as_model(model) if model else None)
    return list(advice(request, [one], Layout.parse(layout)))


def test_the_program_s_own_model_and_the_engine_s_settings() -> None:
    first, *others = lines("ddp", "dp=2,precision=fp32")
    assert first.startswith("plan's best for 2xH100-80GB-SXM: dp=2") and "times as fast as dp=2,precision=fp32" in first
    ddp, fsdp = others
    assert ddp.startswith("with DDP: dp=2,") and "mixed_precision=True" in ddp
    assert fsdp.startswith("with FSDP2: dp=2,zero=3,") and "dp_shard_size=2" in fsdp


def test_settings_are_those_that_change(capsys) -> None:
    """Of FSDP2 that is recorded, not its shards; the command writes the whole file."""
    _, fsdp, command = lines("fsdp", "dp=2,zero=3,precision=fp32", "llama-3.2-1b")
    assert "mixed_precision=True" in fsdp and "dp_shard_size" not in fsdp
    assert command.startswith("shardwise emit llama-3.2-1b --layout dp=2,zero=3") and "--for fsdp2" in command
    assert main(command.split()[1:]) == 0 and '"dp_shard_size": 2' in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_other_engines(engine) -> None:
    """DeepSpeed's file, and Megatron's options."""
    text = lines(engine, "dp=2,precision=fp32", "llama-3.2-1b")[1]
    assert ("stage=" if engine == "deepspeed" else "--bf16") in text


def test_a_plan_that_is_the_program_s() -> None:
    first = lines("fsdp", "dp=2,zero=3", "llama-3.2-1b")[0]
    best = first.split(": ")[1].split(", ")[0]
    assert lines("fsdp", best, "llama-3.2-1b") == [f"{best} is plan's best for 2xH100-80GB-SXM, too"]


@from_table
def test_reasons(layout, model, cluster, config, text) -> None:
    assert text in lines("ddp", layout, model, cluster, config)[0]
