"""The parameter list: complete, uniquely named, and equal to the closed forms of the literature."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.config import Experts, LatentAttention
from shardwise.model.parameters import blueprint, count, count_parts, parameters

SIZES = st.integers(1, 40)


@st.composite
def latents(draw):
    nope, rope = draw(SIZES), 2 * draw(SIZES)
    q_rank, values = draw(st.integers(0, 9)), draw(st.integers(1, nope + rope))
    return LatentAttention(q_rank, draw(SIZES), nope, rope, values)


@st.composite
def models(draw):
    """Small models of every kind, also those that are only counted."""
    kv_heads, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    latent = draw(st.none() | latents())
    layers = draw(st.integers(1, 5))
    count = draw(st.integers(1, 6))
    experts = st.builds(
        Experts,
        count=st.just(count),
        active=st.integers(1, count),
        ffn=SIZES,
        shared=st.integers(0, 2),
        dense_layers=st.integers(0, layers + 1),
        router_bias=st.booleans(),
    )
    return ModelConfig(
        name="model", vocab=draw(SIZES), hidden=draw(SIZES), layers=layers,
        heads=kv_heads if latent else kv_heads * groups, ffn=draw(SIZES), max_positions=draw(SIZES), kv_heads=kv_heads,
        head_dim=0 if latent else 2 * draw(st.integers(1, 8)), norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        positions=draw(st.sampled_from(["rope", "learned", "alibi"])), gated=draw(st.booleans()),
        bias=draw(st.sampled_from(["none", "qkv", "all"])), qk_norm=draw(st.booleans()), tied=draw(st.booleans()),
        embedding_norm=draw(st.booleans()), experts=draw(st.none() | experts), latent_attention=latent,
    )  # fmt: skip


@given(config=models())
def test_count_is_the_sum_over_the_list(config):
    listed = parameters(config)
    total, blocks, active = count_parts(config)
    assert count(config) == total == sum(p.numel for p in listed)
    assert blocks == sum(p.numel for p in listed if p.part.startswith("blocks."))
    experts = sum(p.numel for p in listed if ".experts." in p.name)
    idle = (config.experts.count - config.experts.active) / config.experts.count if experts else 0
    assert active == total - round(experts * idle)
    assert sum(part.count for part in blueprint(config).of_kind("block")) == config.layers


@given(config=models())
def test_names_are_unique_and_start_with_their_part_in_order(config):
    listed = parameters(config)
    assert len({p.name for p in listed}) == len(listed)
    assert all(p.name.startswith(f"{p.part}.") for p in listed)
    names = blueprint(config).names
    assert list(dict.fromkeys(p.part for p in listed)) == names
    assert [p for name in names for p in blueprint(config).parameters_of(name)] == listed


@given(config=models())
def test_matrices_decay_and_start_random_and_the_rest_does_not(config):
    for p in parameters(config):
        assert p.decay == (len(p.shape) == 2) == (p.init == "normal")
        assert p.init != "ones" or "norm" in p.name
        assert p.init != "zeros" or p.name.endswith("bias")


def test_projections_into_the_residual_stream_start_smaller():
    config = get("tiny-gpt")
    small = {p.name for p in parameters(config) if p.init == "normal" and p.std != 0.02}
    assert small == {f"blocks.{i}.{m}.weight" for i in range(4) for m in ("attention.out", "mlp.down")}
    assert blueprint(config).parameters_of("blocks.0")[-2].std == pytest.approx(0.02 / math.sqrt(8))


def test_tied_head_has_no_weight_of_its_own():
    config = get("tiny-llama")
    untied = {p.name for p in parameters(config.replace(tied=False))}
    assert untied - {p.name for p in parameters(config.replace(tied=True))} == {"head.out.weight"}


@given(h=st.integers(1, 20), layers=st.integers(1, 6), vocab=SIZES, seq=SIZES)
def test_gpt_closed_form(h, layers, vocab, seq):
    """Narayanan et al. 2021, equation 2, and the final norm that it leaves out."""
    shape = {"hidden": 4 * h, "heads": 4, "kv_heads": 4, "head_dim": h, "ffn": 16 * h}
    config, h = get("tiny-gpt").replace(**shape, layers=layers, vocab=vocab, max_positions=seq), 4 * h
    assert count(config) == 12 * layers * h * h + 13 * layers * h + (vocab + seq) * h + 2 * h


def test_block_of_llama_2_70b_by_hand():
    h, kv, ffn = 8192, 1024, 28672
    shapes = {
        p.name.removeprefix("blocks.0."): p.shape for p in blueprint(get("llama-2-70b")).parameters_of("blocks.0")
    }
    assert shapes == {
        "attention_norm.weight": (h,),
        "attention.qkv.q.weight": (h, h),
        "attention.qkv.k.weight": (kv, h),
        "attention.qkv.v.weight": (kv, h),
        "attention.out.weight": (h, h),
        "mlp_norm.weight": (h,),
        "mlp.gate_up.gate.weight": (ffn, h),
        "mlp.gate_up.up.weight": (ffn, h),
        "mlp.down.weight": (h, ffn),
    }


def test_active_parameters_of_mixtures():
    """12.9B (Jiang et al. 2024, section 1); 37B (DeepSeek-V3 report, abstract); 21B and 2.4B (DeepSeek-V2 report,
    abstract and section B; the latter without embedding and head); 3B and 22B in the names of Qwen3's."""
    assert round(count_parts(get("mixtral-8x7b"))[2] / 1e9, 1) == 12.9
    assert count_parts(get("deepseek-v3"))[2] == pytest.approx(37e9, rel=0.02)
    assert count_parts(get("deepseek-v2"))[2] == pytest.approx(21e9, rel=0.02)
    lite = get("deepseek-v2-lite")
    assert count_parts(lite)[2] - 2 * lite.vocab * lite.hidden == pytest.approx(2.4e9, rel=0.07)
    assert count_parts(get("qwen3-30b-a3b"))[2] == pytest.approx(3.3e9, rel=0.02)
    assert count_parts(get("qwen3-235b-a22b"))[2] == pytest.approx(22e9, rel=0.02)
