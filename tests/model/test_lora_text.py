import json
from types import SimpleNamespace

import pytest

from harness.cases import from_table
from shardwise.cli.models import model_of
from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.blueprint import Blueprint
from shardwise.model.catalog import get
from shardwise.model.flops import forward_flops_per_token, training_flops_per_token
from shardwise.model.lora import Lora
from shardwise.model.parameters import blueprint, count, count_trained
from shardwise.model.shapes.reader import read_shapes


def test_text_and_back() -> None:
    lora = Lora.parse("rank=16, alpha=32, targets=q_proj+v_proj+q_proj")
    assert lora == Lora(16, 32.0, ("q_proj", "v_proj")) == Lora.parse(str(lora))
    assert lora.scale == 2.0
    assert Lora.parse("rank=4") == Lora(4, 8.0)
    narrow = Lora.parse("rank=4,base=int8")
    assert narrow.base == "int8" and Lora.parse(str(narrow)) == narrow


@from_table
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Lora.parse(text)


def test_the_blueprint_of_llama() -> None:
    plain = get("llama-3-8b")
    model = plain.replace(lora=Lora.parse("rank=16"))
    # Seven maps of each block, each with A of its inputs and B of its outputs.
    widths = (4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 14336) * 3
    assert count_trained(model) == 32 * 16 * widths
    assert count(model) == count(plain) + 32 * 16 * widths
    assert count_trained(plain) == count(plain)
    assert all(p.frozen == (".lora_" not in p.name) for p in blueprint(model).parameters())
    assert ModelConfig.from_json(json.loads(json.dumps(model.to_json()))) == model
    assert Blueprint.from_json(json.loads(json.dumps(blueprint(model).to_json()))) == blueprint(model)
    assert "lora" not in plain.to_json()


def test_flops_leave_out_gradients_of_frozen_weights() -> None:
    plain = get("llama-3-8b")
    model = plain.replace(lora=Lora.parse("rank=16"))
    low = 2 * count_trained(model)
    forward = forward_flops_per_token(plain, 4096)
    assert forward_flops_per_token(model, 4096) == forward + low
    frozen = 2 * (count(plain) - plain.vocab * plain.hidden - (2 * 32 + 1) * 4096)
    assert training_flops_per_token(model, 4096) == 3 * (forward + low) - frozen


def test_the_blueprint_of_a_base_in_8_bits() -> None:
    model = get("llama-3-8b").replace(lora=Lora.parse("rank=16,targets=q,base=int8"))
    held = {p.name: p for p in blueprint(model).parameters()}
    narrow = {name: p for name, p in held.items() if p.dtype}
    assert len(narrow) == 32 * 7 and all(p.frozen and p.dtype == "int8" and len(p.shape) == 2 for p in narrow.values())
    for name, p in narrow.items():
        scales = held[f"{name}_scale"]
        assert scales.frozen and scales.shape == p.shape[:1]
        assert scales.cut == ("replicated" if p.cut == "row" else p.cut)
    assert Blueprint.from_json(json.loads(json.dumps(blueprint(model).to_json()))) == blueprint(model)


def test_targets_by_either_name() -> None:
    model = get("llama-3-8b")
    ours, theirs = (blueprint(model.replace(lora=Lora(4, targets=(name,)))) for name in ("q", "q_proj"))
    assert ours == theirs
    with pytest.raises(UserError, match="did you mean q_proj"):
        blueprint(model.replace(lora=Lora(4, targets=("q_prj",))))


def test_a_convolution_is_no_linear_map() -> None:
    """Falcon-H1's in Mamba has 4 elements per channel, which no block of NF4 divides."""
    model = read_shapes({"model_type": "falcon_h1"}, "f", "f", "a test")
    parts = blueprint(model.replace(lora=Lora(4, base="nf4"))).of_kind("block")
    trained = {p.name for p in parts[0].parameters if not p.frozen}
    narrow = {p.name for p in parts[0].parameters if p.dtype == "nf4" and p.name.endswith(".weight")}
    assert {"mamba.in_proj.lora_a", "self_attn.q_proj.lora_b"} <= trained and "mamba.in_proj.weight" in narrow
    assert not any("conv1d" in name for name in trained | narrow)


@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-deepseek"])
def test_a_run_has_adapters_of_what_no_decoder_here_adapts_by_its_class(name: str) -> None:
    args = SimpleNamespace(model=name, set=[], lora="rank=4,targets=o_proj")
    assert model_of(args, runs=True).counted
    with pytest.raises(UserError, match="no adapters for"):
        model_of(args)
