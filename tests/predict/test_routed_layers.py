"""Routed experts of a served layer: one grouped launch, priced beside measured layers and the old kernel for each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import table
from shardwise.cluster import Cluster
from shardwise.layout import Layout
from shardwise.model.catalog import get
from shardwise.predict.time import Pricing, ServingLayout, decode_step, engine, prefill
from shardwise.predict.time.constants import constants
from shardwise.predict.time.experts import RoutedLayer, experts_hit, grouped_seconds
from shardwise.predict.time.generation import DecodeStrategy
from shardwise.predict.time.serving import decode_products

H100 = Pricing(Cluster.parse("8xH100"))
TRT = engine("tensorrt-llm")
QWEN, DEEPSEEK, MIXTRAL = "qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"
BLOCKS = "fp8-block128x128"
MEASURED = table(__file__, "MEASURED")
"""(model, format, tp, tokens, lowest and highest milliseconds over routings) of one routed layer on an H100 under
TensorRT-LLM 1.3.0rc20: aiconfigurator-core 0.12.0, whose rows of these models no constant is fitted on."""


@pytest.mark.parametrize(("name", "weights", "tp", "tokens", "low", "high"), MEASURED)
def test_a_layer_is_within_a_third_of_its_measured_band(name, weights, tp, tokens, low, high):
    model = get(name)
    _, seconds = decode_products(model, ServingLayout(weights, tp=tp), float(tokens), TRT, H100)
    share = 1 - model.experts.dense_layers / model.layers if model.experts.dense_layers else 1.0
    assert 0.65 * low <= 1e3 * float(seconds) / share <= 1.45 * high  # with the router, shared experts and dense layers


@pytest.mark.parametrize("name", [QWEN, DEEPSEEK])
@pytest.mark.parametrize("software", ["tensorrt-llm", "vllm"])
def test_experts_cut_by_tp_are_no_slower_than_whole_ones_by_more_than_their_rows(name, software):
    times = [
        DecodeStrategy(get(name), Layout.parse(text), engine(software), Cluster.parse("8xH200"), "fp8").token(64, 1000)
        for text in ("tp=8", "tp=8,ep=8")
    ]
    assert 0.6 < times[0].seconds / times[1].seconds < 1.6


@given(st.integers(1, 512), st.floats(0.01, 1.0), st.integers(1, 10_000))
def test_experts_that_have_rows_are_never_more_than_there_are_nor_than_rows(local, chance, tokens):
    hit = experts_hit(local, chance, tokens)
    assert 0 < hit <= local + 1e-9 and hit <= local * chance * tokens + 1e-9


@given(st.sampled_from(["bf16", "fp8", BLOCKS, "nvfp4", "int4-g128"]), st.sampled_from(["tensorrt-llm", "vllm"]))
@settings(max_examples=20, deadline=None)
def test_more_rows_take_longer_and_arrays_are_numbers(weights, software):
    known = constants(Cluster.parse("1xB200").device)
    form = known.expert_form(software, weights)

    def layer(tokens):
        return RoutedLayer(tokens, tokens * 8.0, experts_hit(128, 8 / 128, tokens), 4096, ((3072, 4096), (4096, 1536)))

    tokens = np.array([1.0, 8.0, 64.0, 512.0, 4096.0])
    together = grouped_seconds(layer(tokens), weights, form, known)
    assert together == pytest.approx([float(grouped_seconds(layer(n), weights, form, known)) for n in tokens])
    assert (np.diff(together) > 0).all() and (np.diff(together / tokens) < 0).all()


def test_prompts_are_read_in_one_launch_too():
    """A launch for each of 128 experts took 128 times a product's latency in each of 48 layers."""
    model = get(QWEN)
    seconds = float(prefill(model, ServingLayout("fp8"), 1.0, 200.0, TRT, H100).seconds)
    assert seconds < 48 * 128 * 2 * 2.4e-6


def test_ranks_with_sequences_of_their_own_pay_for_the_way_to_the_experts():
    """Attention-dp: tp=1 and whole experts on eight ranks; each rank's tokens go to all and back."""
    apart = decode_step(get(QWEN), ServingLayout("fp8", tp=1, ep=8, etp=1), 16.0, 1000.0, TRT, H100)
    alone = decode_step(get(QWEN), ServingLayout("fp8"), 16.0, 1000.0, TRT, H100)
    assert "experts" in apart.parts and "experts" not in alone.parts
    assert float(apart.parts["experts"]) > 0 and float(apart.parts["tensor"]) == 0
