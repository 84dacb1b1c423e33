"""Models that are counted from their tensors' shapes: published configurations against their classes."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from harness.today import EVERYTHING, seed
from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.catalog import resolve
from shardwise.model.parameters import count, count_parts
from shardwise.model.shapes.reader import language_model, read_shapes
from shardwise.model.shapes.reading import families

ROWS = [
    json.loads(line)
    for line in lzma.decompress(Path(__file__).with_name("published_models.jsonl.xz").read_bytes()).splitlines()
]
"""Counts of the classes of transformers 5.24, built on the meta device."""
COUNTED = [row for row in ROWS if "text_parameters" in row and row["config"]["model_type"] != "vit"]


def in_data(row) -> bool:
    """Whether the packaged data has the family of a configuration."""
    return language_model(row["config"], "")[0] in families()


TODAY = [row for row in COUNTED if in_data(row)]
SAMPLE = COUNTED if EVERYTHING else [TODAY[(seed() * 20 + i) % len(TODAY)] for i in range(20)]


HALF = {"qwen3_5_27b", "qwen3_5_35b_a3b"}
"""Their rows have the cache of half as wide heads as the class builds where a configuration leaves head_dim out."""


def read(row) -> ModelConfig:
    return read_shapes(row["config"], row["name"], row["name"], "counted but not runnable here")


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row["name"])
def test_published_models_have_the_parameters_and_the_cache_of_their_classes(row):
    model = read(row)
    total, _, active = count_parts(model)
    assert total == row["text_parameters"]
    assert active == (row["active_text_parameters"] or total)
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


ABSENT = {
    # Classes that transformers lacks: counts of the published weights, or of the code beside them.
    "baichuan2_7b": 7_505_973_248,
    "xverse_7b": 7_299_846_144,
    "internlm2_reward": 7_737_708_544,
    "glm4_9b": 9_399_951_360,
    "phi3_v": 3_821_079_552,
}


@pytest.mark.parametrize("name", ABSENT)
def test_models_whose_class_transformers_lacks_are_counted_by_the_table(name):
    (row,) = [row for row in ROWS if row["name"] == name]
    assert count(read(row)) == ABSENT[name]


def test_a_vision_model_is_no_language_model():
    (row,) = [row for row in ROWS if row["config"]["model_type"] == "vit"]
    with pytest.raises(UserError, match="vit"):
        read(row)


HUB = {
    # Counts of the published weights.
    "openai/gpt-oss-120b": 116_829_156_672,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "Qwen/Qwen3-8B-FP8": 8_190_735_360,
    "Qwen/Qwen3-14B-FP8": 14_768_307_200,
    "moonshotai/Kimi-K2-Instruct": 1_026_408_209_408,
    "moonshotai/Moonlight-16B-A3B": 15_960_108_544,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "google/gemma-2-9b": 9_241_705_984,
    "microsoft/phi-4": 14_659_507_200,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Large-Instruct-2407": 122_610_069_504,
    "01-ai/Yi-1.5-9B": 8_829_407_232,
    "deepseek-ai/deepseek-coder-6.7b-base": 6_740_512_768,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "tiiuae/falcon-7b": 6_921_720_704,
}


@pytest.mark.parametrize("name", HUB)
def test_popular_models_are_found_by_their_names_without_a_network(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = resolve(name)
    assert count(model) == HUB[name]
    assert model.name in (name, name.rsplit("/")[-1].lower())  # the catalog goes first


def test_an_unknown_name_of_the_hub_names_near_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="did you mean openai/gpt-oss-120b"):
        resolve("openai/gpt-oss-12b")
