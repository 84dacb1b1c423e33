import json
import lzma
import re
import tomllib
from pathlib import Path

import pytest

from harness.cases import from_table, table
from harness.today import EVERYTHING, seed
from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.layout.model_size import size_words
from shardwise.model import ModelConfig
from shardwise.model.catalog import resolve
from shardwise.model.formats import weight_format
from shardwise.model.hub import full_id, hub_models
from shardwise.model.huggingface import read_fields, read_model
from shardwise.model.parameters import count, count_parts
from shardwise.model.precision import read_precision
from shardwise.model.shapes.reader import language_model, read_shapes
from shardwise.model.shapes.reading import families
from shardwise.planner.serving import plan_serving
from shardwise.predict import estimate
from shardwise.predict.time.serving import ServingLayout, weight_bytes

ROWS = [
    json.loads(line)
    for line in lzma.decompress(Path(__file__).with_name("published_models.jsonl.xz").read_bytes()).splitlines()
]
"""Counts of the classes of transformers 5.24, built on the meta device."""
COUNTED = [row for row in ROWS if "text_parameters" in row and row["config"]["model_type"] != "vit"]


def in_data(row) -> bool:
    return language_model(row["config"], "")[0] in families()


TODAY = [row for row in COUNTED if in_data(row)]
SAMPLE = COUNTED if EVERYTHING else [TODAY[(seed() * 20 + i) % len(TODAY)] for i in range(20)]


HEADS = {"Mistral-Small-3.2-24B-Instruct-2506": 131_072 * 5_120}
"""Their rows have no head of its own, as the class ties it by default; text_config and the files have one."""
HALF = {"qwen3_5_27b", "qwen3_5_35b_a3b"}
"""Their rows have the cache of half as wide heads as the class builds where a configuration leaves head_dim out."""


def read(row) -> ModelConfig:
    return read_shapes(row["config"], row["name"], row["name"], "counted but not runnable here")


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row["name"])
def test_published_models_have_the_parameters_and_the_cache_of_their_classes(row):
    model = read(row)
    total, _, active = count_parts(model)
    head = HEADS.get(row["name"], 0)
    assert total == row["text_parameters"] + head
    assert active == (row["active_text_parameters"] or row["text_parameters"]) + head
    if row["cache"]:
        assert model.counted is not None
        caches = model.counted.caches
        full = [2 * c.numbers for c in caches if c.kind in ("full", "latent")]
        windowed = [2 * c.numbers for c in caches if c.kind == "window"]
        if row["name"] not in HALF:
            assert (sum(full), len(full)) == (row["cache"]["full"], row["cache"]["nf"])
        assert (sum(windowed), len(windowed)) == (row["cache"]["win"], row["cache"]["nw"])
        assert {c.window for c in caches if c.kind == "window"} <= {row["cache"]["W"]}


def test_most_of_the_published_models_need_no_transformers():
    assert len(TODAY) >= 100


ABSENT = table(__file__, "ABSENT")


@pytest.mark.parametrize("name", ABSENT)
def test_models_whose_class_transformers_lacks_are_counted_by_the_table(name):
    (row,) = [row for row in ROWS if row["name"] == name]
    assert count(read(row)) == ABSENT[name]


NAMED = list(table(__file__, "NAMED"))


@pytest.mark.parametrize(
    ("config", "parameters"), NAMED, ids=lambda value: value["model_type"] if type(value) is dict else ""
)
def test_other_names_of_known_shapes_are_read_by_data(config, parameters):
    model = read_fields(dict(config), config["model_type"])
    assert count(model) == parameters
    assert model.counted is not None and model.counted.caches[-1].kind == "full"
    if config["model_type"].startswith("minimax"):
        assert [cache.kind for cache in model.counted.caches[:8]] == ["linear"] * 7 + ["full"]


@from_table
def test_states_of_linear_layers(model_type, fields, state):
    model = read_fields({"model_type": model_type, "tie_word_embeddings": False, **fields}, model_type)
    states = {cache.state for cache in model.counted.caches}
    if state is None:
        assert 0 < max(states) < 10**5
    else:
        assert max(states) == state


BLOOM = table(__file__, "BLOOM")


def test_bloom_is_counted_as_the_catalog_has_it():
    assert count(read_fields(BLOOM, "bloom")) == count(resolve("bloom-176b"))


LFM2 = table(__file__, "LFM2")


def test_layers_of_which_a_list_has_the_numbers_have_attention_and_a_cache():
    model = read_fields(LFM2, "LFM2-1.2B")
    assert count(model) == 1_170_340_608  # the published file
    assert model.counted is not None
    assert [i for i, cache in enumerate(model.counted.caches) if cache.kind == "full"] == LFM2["full_attn_idxs"]


def test_last_layers_without_keys_of_their_own_share_a_cache():
    (row,) = [row for row in ROWS if row["config"]["model_type"] == "gemma3n_text"]
    caches = read(row).counted.caches
    assert count(read(row)) == row["text_parameters"]
    assert [cache.kind for cache in caches] == [*("window",) * 4, "full"] * 4 + ["none"] * 15


def test_a_size_that_no_known_class_reads_is_named():
    (row,) = [row for row in ROWS if row["name"] == "moonshotai/Kimi-K3"]
    with pytest.raises(UserError, match="routed_expert_hidden_size=3584: not known for kimi_linear"):
        read(row)


PREDICTING = {
    # Parameters in the published index beside those of the model: less the corrections of its routers, which are no
    # parameters of the class.
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 81_324_862_720 - 79_674_391_296,
    "zai-org/GLM-4.6": 356_785_898_816 - 352_797_814_784 - 90 * 160,
}


@pytest.mark.parametrize("name", PREDICTING)
def test_layers_for_multi_token_prediction_are_said_apart(name):
    model = resolve(name)
    assert model.counted is not None
    assert model.counted.predicting == PREDICTING[name]
    assert "for multi-token prediction" in size_words(model)


def test_a_vision_model_is_no_language_model():
    (row,) = [row for row in ROWS if row["config"]["model_type"] == "vit"]
    with pytest.raises(UserError, match="vit"):
        read(row)


HUB = table(__file__, "HUB")


def test_a_vision_models_own_text_says_whether_its_head_is_tied():
    # Files of 48.0 GB: 24.0e9 parameters with 0.4e9 of the encoder of images.
    model = resolve("mistralai/Mistral-Small-3.2-24B-Instruct-2506", fetch=False)
    assert count(model) == 23_572_403_200 and not model.tied


@pytest.mark.parametrize("name", HUB)
def test_popular_models_are_found_by_their_names_without_a_network(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = resolve(name)
    assert count(model) == HUB[name]
    assert model.name in (name, name.rsplit("/")[-1].lower())  # the catalog goes first


def test_names_that_state_a_precision_have_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    quantized = [name for name in hub_models() if re.search("FP8|FP4|AWQ|GPTQ|Int[48]", name)]
    stored = {name: resolve(name, stored=True).counted.stored for name in quantized}
    assert len(stored) >= 20 and all(stored.values())
    assert stored["Qwen/Qwen3-235B-A22B-FP8"] == "fp8-block128x128"
    assert stored["Qwen/Qwen2.5-72B-Instruct-AWQ"] == "int4-g128z"


def test_keys_of_an_indexer_have_a_byte_each_and_their_scales():
    counted = resolve("deepseek-ai/DeepSeek-V3.2").counted
    latent, index = 512 + 64, 128 + 4
    assert counted.cache_bytes(1, tp=8) == 61 * (2 * latent + index)
    assert counted.cache_bytes(1, tp=8, width=1) == 61 * (latent + index)


def test_an_unknown_name_of_the_hub_names_near_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="did you mean openai/gpt-oss-120b"):
        resolve("openai/gpt-oss-12b")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("GPT-OSS-120b", "openai/gpt-oss-120b"), ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("gemma-3-27b", "google/gemma-3-27b-it"), ("kimi-k2", "moonshotai/Kimi-K2-Base"), ("glm-4", ""),
        ("gpt-oss-21b", "openai/gpt-oss-20b"),
        ("mistral-small", "mistralai/Mistral-Small-24B-Base-2501"), ("command-r", "CohereLabs/c4ai-command-r-v01"),
    ],
)  # fmt: skip
def test_popular_models_are_found_without_their_owner(name, known, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    if name in ("gpt-oss-21b", "mistral-small", "command-r"):  # several shapes: a question
        with pytest.raises(UserError, match=f"did you mean {known} or "):
            resolve(name)
    elif known:
        assert resolve(name) == resolve(known) and full_id(name) == known
    else:
        assert full_id(name) == name


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PRECISIONS = [
    (FP8, "fp8-block128x128", 1 + 4 / 128**2),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4-g128z", 0.5 + 2.5 / 128),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4-g128z", 0.5 + 2.5 / 128),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4-g64s4", 0.5 + 4 / 64),
    (
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        "nf4-g64",
        0.5 + (1 + 4 / 256) / 64,
    ),
    ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True}, "int4-g0z", 0.5 + (2 + 0.5) / 4096),
    ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4-g32", 0.5 + 1 / 32),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4-g16", 0.5 + 1 / 16),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": 8, "type": "float"}}}},
        "fp8",
        1 + 4 / 2**22,
    ),
]


@pytest.mark.parametrize(("given", "words", "each"), PRECISIONS, ids=lambda value: value if type(value) is str else "")
def test_quantized_matrices_have_the_bytes_of_their_format_and_its_scales(given, words, each):
    precision = read_precision({"quantization_config": given})
    assert precision is not None
    assert precision.of("model.layers.3.mlp.experts.down_proj", (1024, 4096)) == words
    assert weight_format(words).nbytes((1024, 4096)) == each * 2**22
    assert precision.of("model.layers.3.input_layernorm", (4096,)) == ""
    assert precision.of("model.layers.3.mlp.gate", (64, 4096)) == "" or given["quant_method"] == "mxfp4"


def test_modules_that_a_quantizer_leaves_alone_stay_in_16_bits():
    given = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["model.layers.0.self_attn*", "re:.*shared.*"],
    }
    precision = read_precision({"quantization_config": given})
    assert precision is not None
    names = ("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.1.mlp.shared_experts.up_proj")
    assert [precision.of(f"model.language_model.{n}", (64, 64)) for n in names] == ["", "nvfp4-g16", ""]


def test_a_quantizer_that_is_not_known_is_named_in_one_line():
    with pytest.raises(UserError, match="quant_method 'magic' is not known; known are fp8") as error:
        read_precision({"quantization_config": {"quant_method": "magic", "groups": list(range(2000))}})
    assert len(str(error.value)) < 300


QUANTIZERS = tomllib.loads((Path(__file__).parent / "quantizers.toml").read_text(encoding="utf-8"))["quantizer"]


@pytest.mark.parametrize("row", QUANTIZERS, ids=lambda row: row.get("words") or row["refused"])
def test_a_quantizer_has_a_format_or_one_line(row):
    given = {"quantization_config": json.loads(row["config"])}
    if "refused" in row:
        with pytest.raises(UserError, match=row["refused"]):
            read_precision(given)
        return
    assert read_precision(given).of("model.layers.3.mlp.down_proj", (1024, 4096)) == row["words"]


def test_modules_have_formats_of_their_own():
    """compressed-tensors' groups, GPTQModel's dynamic, AutoRound's extra_config."""
    names = [f"model.layers.0.{n}" for n in ("self_attn.q_proj", "mlp.experts.0.up_proj", "mlp.up_proj")] + ["lm_head"]
    groups = {
        "group_0": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}},
        "group_1": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
    }
    every = [
        ({"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]},
         ["fp8", "nvfp4-g16", "nvfp4-g16", ""]),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*self_attn": {}, "+:.*experts": {"bits": 8}}},
         ["", "int8-g128z", "int4-g128z", ""]),
        ({"quant_method": "auto-round", "bits": 4, "sym": True, "extra_config": {names[2]: {"bits": 16}}},
         ["int4-g128", "int4-g128", "", ""]),
    ]  # fmt: skip
    for given, words in every:
        precision = read_precision({"quantization_config": given})
        assert precision and [precision.of(name, (64, 64)) for name in names] == words


QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960,
}  # fmt: skip


def test_a_folder_is_read_in_the_precision_of_its_quantizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    assert read_model(tmp_path).why_not_runnable() is None
    quantizer = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantizer))
    model = read_model(tmp_path)
    assert (model.name, model.counted and model.counted.stored, count(model)) == (tmp_path.name, "fp8", 8_190_735_360)
    tables = 2 * 2 * 4096 * 151936
    nbytes = float(weight_bytes(model, ServingLayout("bfloat16")))
    assert nbytes == pytest.approx(tables + 8_190_735_360 - tables / 2, rel=1e-3)
    assert "quantized" in str(model.why_not_runnable())


def test_plans_and_estimates_answer_for_a_model_that_is_only_counted():
    config = {**QWEN3_8B, "num_hidden_layers": 4, "made_up": 1}
    model = read_fields(config, "made-up")
    assert model.counted is not None and "made_up" in str(model.why_not_runnable())
    report = estimate(model, "tp=2,dp=2", seq=1024, batch=4, cluster="4xH100")
    assert report.time is not None
    plan = plan_serving(model, "2xH100", Workload(prompt=100, output=20, concurrency=4))
    assert plan.ranked


def test_a_counted_model_survives_json_and_a_cut():
    model = read_fields({**QWEN3_8B, "made_up": 1}, "made-up")
    assert ModelConfig.from_json(model.to_json()) == model
    two = model.replace(layers=2)
    assert count(two) == count(read_fields({**QWEN3_8B, "num_hidden_layers": 2}, "two"))


@from_table
def test_damaged_configurations_are_refused_in_one_line(config, match):
    with pytest.raises(UserError, match=match) as error:
        read_fields(config, "damaged")
    assert "\n" not in str(error.value)
