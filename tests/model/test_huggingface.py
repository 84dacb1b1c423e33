import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cases import from_table, table
from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog, get
from shardwise.model.config import Experts, LatentAttention, RopeScaling, YarnScaling
from shardwise.model.huggingface import from_huggingface, to_huggingface
from shardwise.model.parameters import count

# As published beside the weights, written by many versions of transformers.
LLAMA_31_8B = table(__file__, "LLAMA_31_8B")
MISTRAL_7B_V03 = table(__file__, "MISTRAL_7B_V03")
QWEN25_05B = table(__file__, "QWEN25_05B")
# Written by transformers 5.
QWEN3_06B = table(__file__, "QWEN3_06B")
GPT2 = table(__file__, "GPT2")
NEOX_20B = table(__file__, "NEOX_20B")
MIXTRAL = table(__file__, "MIXTRAL")
DEEPSEEK_V3 = table(__file__, "DEEPSEEK_V3")
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "quantization_config": None,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}
del DEEPSEEK_V2["num_nextn_predict_layers"]
DEEPSEEK_V2_LITE = DEEPSEEK_V2 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}
QWEN3_30B_A3B = table(__file__, "QWEN3_30B_A3B")
PUBLISHED = {
    "llama-3.1-8b": LLAMA_31_8B,
    "mistral-7b": MISTRAL_7B_V03,
    "qwen2.5-0.5b": QWEN25_05B,
    "qwen3-0.6b": QWEN3_06B,
    "gpt2": GPT2,
    "gpt-neox-20b": NEOX_20B,
    "mixtral-8x7b": MIXTRAL,
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "deepseek-v3": DEEPSEEK_V3,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
}


def refusal(data, **changes) -> str:
    with pytest.raises(UserError) as caught:
        from_huggingface(data | changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_the_catalog_entry(name):
    expected = get(name)
    read = from_huggingface(PUBLISHED[name], name=name)
    assert read == expected.replace(published_params=None)
    assert count(read) == expected.published_params


@pytest.mark.parametrize("name", PUBLISHED)
@given(field=st.text(min_size=1).filter(str.isprintable), value=st.none() | st.booleans() | st.integers())
def test_unknown_field_is_refused_by_name(name, field, value):
    field = f"new_{field}"
    assert f"field {field} is not known" in refusal(PUBLISHED[name], **{field: value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data(), name=st.sampled_from(list(PUBLISHED)), value=JSON)
def test_any_value_is_read_or_refused_in_one_line(data, name, value):
    field = data.draw(st.sampled_from(sorted(PUBLISHED[name])))
    try:
        config = from_huggingface(PUBLISHED[name] | {field: value})
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(config, ModelConfig)


@from_table
def test_value_that_changes_the_mathematics_is_refused_by_name(name, field, value):
    assert field in refusal(PUBLISHED[name], **{field: value})


def test_groups_that_cannot_be_are_refused():
    assert "256 experts cannot be in 7 groups" in refusal(DEEPSEEK_V3, n_group=7)
    assert "1 of 8 groups have fewer than 33 experts" in refusal(DEEPSEEK_V3, topk_group=1, num_experts_per_tok=33)


def test_groups_are_for_one_way_of_choosing_alone():
    """`topk_method: greedy` reads over them, in transformers too."""
    assert from_huggingface(DEEPSEEK_V2_LITE | {"n_group": 8, "topk_group": 3}) == from_huggingface(DEEPSEEK_V2_LITE)


def test_factors_of_rotated_elements_alone_are_refused():
    table = DEEPSEEK_V3["rope_scaling"]
    assert "mscale and mscale_all_dim must be equal" in refusal(DEEPSEEK_V3, rope_scaling=table | {"mscale": 0.707})
    assert "attention_factor=2.0" in refusal(DEEPSEEK_V3, rope_scaling=table | {"attention_factor": 2.0})
    assert "mscale_all_dim is missing" in refusal(DEEPSEEK_V3, rope_scaling=table | {"mscale_all_dim": None})


def test_balance_losses_are_read():
    read = from_huggingface(DEEPSEEK_V3 | {"seq_aux": False, "aux_loss_alpha": 0.5}).experts
    assert (read.balance, read.balance_loss) == ("micro-batch", 0.5)
    for config in (MIXTRAL, QWEN3_30B_A3B):
        read = from_huggingface(config | {"router_aux_loss_coef": 0.25}).experts
        assert (read.balance, read.balance_loss) == ("sequence", 0.25)


def test_n_ctx_says_nothing_as_in_transformers():
    assert from_huggingface(GPT2 | {"n_ctx": 512}).max_positions == 1024
    without = {name: value for name, value in GPT2.items() if name != "n_positions"}
    assert from_huggingface(without | {"n_ctx": 512}).max_positions == 1024
    assert from_huggingface(without | {"n_ctx": 512, "max_position_embeddings": 256}).max_positions == 256


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "mrope"])
@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_rope_types_are_refused(kind, table, key):
    assert f"rope type {kind!r}" in refusal(MISTRAL_7B_V03, **{table: {key: kind, "factor": 2.0}})


def test_rope_scaling_and_rope_parameters_mean_the_same():
    old = LLAMA_31_8B
    new = {k: v for k, v in old.items() if k not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = old["rope_scaling"] | {"rope_theta": old["rope_theta"]}
    assert from_huggingface(new) == from_huggingface(old)
    assert from_huggingface(old).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


def test_rope_that_contradicts_itself_is_refused():
    assert "rope_theta" in refusal(QWEN3_06B, rope_theta=10000.0)
    assert "factor" in refusal(LLAMA_31_8B, rope_parameters=LLAMA_31_8B["rope_scaling"] | {"factor": 4.0})
    assert "rotary_pct" in refusal(NEOX_20B, partial_rotary_factor=0.5)


def test_frequency_factors_in_the_wrong_order_are_refused():
    table = LLAMA_31_8B["rope_scaling"] | {"high_freq_factor": 1.0}
    assert "high_freq_factor" in refusal(LLAMA_31_8B, rope_scaling=table)


def test_rotary_settings_that_transformers_reads_over_are_refused():
    bare = {k: v for k, v in NEOX_20B.items() if k not in ("rotary_emb_base", "rotary_pct")}
    assert "rope_theta=100.0 is not read by transformers; write it as rotary_emb" in refusal(bare, rope_theta=100.0)
    assert "write it as rotary_pct" in refusal(bare, partial_rotary_factor=0.5)
    # What says the same, as transformers 4 wrote it, and what stands in the table, is fine.
    assert from_huggingface(bare | {"rope_theta": 10000, "partial_rotary_factor": 0.25}) == from_huggingface(NEOX_20B)
    table = {"rope_type": "default", "rope_theta": 100.0}
    assert from_huggingface(bare | {"rope_scaling": table, "rope_theta": 100.0}).rope_theta == 100.0
    assert "rope_parameters.rope_theta is not read by transformers beside rope_scaling" in refusal(
        bare, rope_parameters=table, rope_scaling={"rope_type": "default"}
    )


def test_unknown_field_inside_rope_parameters_is_refused_by_name():
    table = {"rope_type": "default", "mrope_section": [1]}
    assert "rope_parameters.mrope_section" in refusal(MISTRAL_7B_V03, rope_parameters=table)


def test_gpt_neox_of_transformers_5_rotates_a_quarter():
    new = {k: v for k, v in NEOX_20B.items() if not k.startswith("rotary")}
    table = {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"}
    assert from_huggingface(new | {"rope_parameters": table}) == from_huggingface(NEOX_20B)
    assert from_huggingface(new) == from_huggingface(NEOX_20B)


def test_window_is_refused_only_where_it_hides_something():
    assert "sliding_window=4096" in refusal({k: v for k, v in MISTRAL_7B_V03.items() if k != "sliding_window"})
    wide = MISTRAL_7B_V03 | {"sliding_window": 32768}
    assert from_huggingface(wide) == from_huggingface(MISTRAL_7B_V03)
    used = QWEN25_05B | {"use_sliding_window": True, "sliding_window": 4096}
    assert from_huggingface(used) == from_huggingface(QWEN25_05B), "windows start after the last layer"
    assert "sliding_window" in refusal(used, max_window_layers=23)
    assert "sliding_window" in refusal(QWEN3_06B, layer_types=["full_attention"] * 27 + ["sliding_attention"])


def test_defaults_of_the_family_fill_what_older_files_leave_out():
    bare = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    llama = from_huggingface(bare | {"model_type": "llama"})
    assert (llama.kv_heads, llama.max_positions, llama.norm_eps, llama.tied) == (8, 2048, 1e-6, False)
    qwen3 = from_huggingface(bare | {"model_type": "qwen3", "num_key_value_heads": 4})
    assert (qwen3.head_dim, qwen3.rope_theta, qwen3.qk_norm) == (128, 10000.0, True)
    neox = from_huggingface(bare | {"model_type": "gpt_neox"})
    assert (neox.rotary_fraction, neox.activation, neox.parallel_residual) == (0.25, "gelu", True)
    gpt2 = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 8}
    gpt = from_huggingface(gpt2)
    assert (gpt.ffn, gpt.tied, gpt.dropout, gpt.attention_dropout, gpt.max_positions) == (256, True, 0.1, 0.1, 1024)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_missing_required_field_is_named(field):
    assert f"{field} is missing" in refusal({k: v for k, v in LLAMA_31_8B.items() if k != field})
    assert f"{field} is missing" in refusal(LLAMA_31_8B, **{field: None})


def test_other_model_types_are_refused_with_those_that_are_read():
    assert "'t5'" in refusal({}, model_type="t5")
    assert "llama" in refusal({})
    assert "model_type" in refusal({}, model_type=["llama"])


def test_file_and_folder_are_read_under_the_folders_name(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT2))
    for source in (folder, str(folder), folder / "config.json"):
        assert from_huggingface(source) == get("gpt2").replace(name="my-model", published_params=None)
    assert from_huggingface(folder, name="other").name == "other"


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"", b"[" * 100_000, b'["llama"]', b"3"])
def test_files_that_are_no_config_are_refused_by_path(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for source in (path, tmp_path):
        with pytest.raises(UserError, match=r"config\.json") as caught:
            from_huggingface(source)
        assert "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*none\.json: No such file"):
        from_huggingface(tmp_path / "none.json")
    with pytest.raises(UserError, match=r"cannot read .*config\.json: No such file"):
        from_huggingface(tmp_path)


SIZES = st.integers(1, 2**40)
RATES = st.floats(0, 0.99)
POSITIVE = st.floats(1e-300, 1e300)


@st.composite
def llamas(draw):
    kv_heads, groups = draw(st.integers(1, 16)), draw(st.integers(1, 8))
    bias = draw(st.sampled_from(["none", "qkv"]))
    low, high = st.floats(1e-300, 1.0), st.floats(2.0, 1e300)
    scaling = st.builds(RopeScaling, POSITIVE, low, high, SIZES)
    return ModelConfig(
        name=draw(st.text(min_size=1)), vocab=draw(SIZES), hidden=draw(SIZES), layers=draw(st.integers(1, 200)),
        heads=kv_heads * groups, ffn=draw(SIZES), max_positions=draw(SIZES), kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 1024)), norm_eps=draw(POSITIVE), rope_theta=draw(POSITIVE),
        rope_scaling=draw(st.none() | scaling), bias=bias, qk_norm=bias == "none" and draw(st.booleans()),
        tied=draw(st.booleans()), attention_dropout=draw(RATES),
    )  # fmt: skip


@st.composite
def gpts(draw):
    heads, head_dim = draw(st.integers(1, 128)), 4 * draw(st.integers(1, 256))
    rope = draw(st.booleans())
    return ModelConfig(
        name=draw(st.text(min_size=1)), vocab=draw(SIZES), hidden=heads * head_dim, layers=draw(SIZES), heads=heads,
        ffn=draw(SIZES), max_positions=draw(SIZES), norm="layernorm", norm_eps=draw(POSITIVE),
        positions="rope" if rope else "learned", rope_theta=draw(POSITIVE) if rope else 10000.0,
        rotary_fraction=draw(st.sampled_from([0.5, 1.0])) if rope else 1.0,
        activation=draw(st.sampled_from(["gelu", "gelu_tanh"])), gated=False, bias="all", tied=draw(st.booleans()),
        parallel_residual=rope and draw(st.booleans()), dropout=draw(RATES), attention_dropout=draw(RATES),
    )  # fmt: skip


@st.composite
def mixtures(draw):
    model, size = draw(llamas()).replace(bias="none", qk_norm=False), st.integers(1, 2**20)
    groups, family = draw(st.integers(1, 4)), draw(st.sampled_from(["mixtral", "qwen3_moe", "deepseek"]))
    each, active_groups = draw(st.integers(1, 8)), draw(st.integers(1, groups))
    active, ffn, loss = draw(st.integers(1, each * active_groups)), draw(size), draw(st.floats(0, 1))
    experts = Experts(groups * each, active, ffn, balance_loss=loss)
    if family == "mixtral":
        return model.replace(ffn=ffn, experts=experts)
    if family == "qwen3_moe":
        return model.replace(qk_norm=True, experts=replace(experts, normalized=draw(st.booleans())))
    third = draw(st.booleans())
    routing = {"scoring": "sigmoid", "router_bias": True, "normalized": draw(st.booleans())}
    limits = {
        "groups": groups,
        "active_groups": active_groups,
        "group_score": "top 2" if third or groups < 2 else "max",
    }
    experts = replace(
        experts,
        **limits,
        **routing if third else {"normalized": False},
        shared=draw(st.integers(1, 4)),
        dense_layers=draw(st.integers(0, 300)),
        scale=draw(POSITIVE),
        balance=draw(st.sampled_from(["sequence", "micro-batch"])),
    )
    nope, rope = draw(st.integers(1, 64)), 2 * draw(st.integers(1, 32))
    latent = LatentAttention(draw(st.integers(0, 64)), draw(size), nope, rope, draw(st.integers(1, nope + rope)))
    scaling = st.builds(YarnScaling, POSITIVE, SIZES, POSITIVE, POSITIVE, POSITIVE)
    changes = {"kv_heads": model.heads, "head_dim": 0, "norm_eps": 1e-6, "rope_scaling": draw(st.none() | scaling)}
    return model.replace(**changes, experts=experts, latent_attention=latent)


@given(config=llamas() | gpts() | mixtures())
def test_round_trip(config):
    written = json.loads(json.dumps(to_huggingface(config)))
    assert from_huggingface(written) == config


@pytest.mark.parametrize("config", catalog().values(), ids=catalog())
def test_every_runnable_model_of_the_catalog_is_written_and_every_other_refused(config):
    if reason := config.why_not_runnable():
        with pytest.raises(UserError, match=config.name) as caught:
            to_huggingface(config)
        assert reason in str(caught.value)
    else:
        experts = config.experts and replace(config.experts, bias_rate=0.0)
        expected = config.replace(published_params=None, experts=experts)
        assert from_huggingface(to_huggingface(config)) == expected, "all but what training alone reads"


MIXTURES = {
    "mixtral": get("tiny-mixtral"),
    "qwen3_moe": get("tiny-qwen3-moe"),
    "deepseek_v3": get("tiny-deepseek"),
    "deepseek_v2": from_huggingface(DEEPSEEK_V2),
}


@from_table
def test_mixture_that_its_family_does_not_compute_is_not_written(family, changes, reason):
    model = MIXTURES[family]
    assert to_huggingface(model)["model_type"] == family
    with pytest.raises(UserError, match=f"{family} has no .*{reason}"):
        to_huggingface(model.replace(experts=replace(model.experts, **changes)))


@from_table
def test_model_that_no_family_computes_is_not_written(name, changes, reason):
    with pytest.raises(UserError, match=reason):
        to_huggingface(get(name).replace(**changes))
