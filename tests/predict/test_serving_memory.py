"""Memory of served models: one count for plans, explanations, comparisons and published rows, beside real servers."""

import random

import pytest

from shardwise.cli.show.explain_table import serving
from shardwise.cluster import Cluster
from shardwise.errors import LayoutError, UserError
from shardwise.interop import ServerSettings, WriteRequest, read
from shardwise.interop.writing.writer import write
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import get
from shardwise.model.formats import FORMS, weight_format
from shardwise.planner.serving import _RankMemory, _Space, plan_serving
from shardwise.predict.memory.serving import ServingSetup, held_by, page_bytes, stage_bytes, weight_bytes
from shardwise.predict.serving_layout import plan_of
from shardwise.predict.time import engine

VLLM = engine("vllm")


def explained(command: str, model: str, cluster: str):
    return serving(read([command]), get(model), Cluster.parse(cluster))


def test_a_checkpoint_of_awq_has_the_bytes_of_its_files():
    """TheBloke/Llama-2-70B-AWQ: 36.6 GB of files, 18.3 GB on each of two GPUs."""
    told = explained("vllm serve x --quantization awq -tp 2", "llama-2-70b", "2xA100")
    assert told.weights == pytest.approx(18.3e9, rel=0.005)


def test_tokens_of_a_real_server():
    """Qwen3-235B-A22B-FP8 on four H100: 178,880 tokens of cache in a server's log; weights alone leave 362,379."""
    told = explained("vllm serve x --quantization fp8 -tp 4", "qwen3-235b-a22b", "4xH100")
    assert told.tokens == pytest.approx(178_880, rel=0.25)
    assert told.workspace > 5e9


def test_layers_with_a_window_keep_no_more_than_it():
    model, tokens = get("gemma-2-9b"), 7_500
    whole, kept = (page_bytes(plan_of(model, Layout()), 16, tokens, "", one) for one in (None, VLLM))
    assert whole / kept == pytest.approx(2 / (1 + 4096 / tokens), rel=1e-3)  # every second layer has a window
    assert page_bytes(plan_of(model, Layout()), 16, 4096, "", VLLM) == whole


@pytest.mark.parametrize(
    ("name", "text"), [("deepseek-v3", "tp=8,pp=4"), ("llama-3-8b", "pp=3"), ("gemma-2-9b", "tp=2,pp=5")]
)
def test_each_stage_has_its_own_weights(name, text):
    model, layout = get(name), Layout.parse(text)
    served = ServingSetup(8192, 4, weights="fp8", engine=VLLM)
    stages = stage_bytes(model, layout, served)
    plans = [plan_of(model, layout, stage) for stage in range(layout.pp)]
    assert [one.weights for one in stages] == [weight_bytes(plan, weights="fp8") for plan in plans]
    assert [one.page for one in stages] == [page_bytes(plan, 16, 8192, "", VLLM) for plan in plans]
    assert len({one.weights for one in stages}) > 1


LAYOUTS = ("llama-3-8b", "llama-3-70b", "qwen3-30b-a3b", "mixtral-8x7b", "gemma-2-9b", "deepseek-v2-lite")


def random_layouts(count: int):
    chance = random.Random(51)
    while count:
        name, sizes = chance.choice(LAYOUTS), (chance.choice((1, 2, 4, 8)), chance.choice((1, 2, 3, 4)))
        settings = chance.choice(("bf16", "fp8")), chance.choice(("auto", "fp8")), chance.randrange(1, 64)
        count -= 1
        yield name, Layout(tp=sizes[0], pp=sizes[1]), *settings, chance.randrange(16, 4000)


def test_plan_explanation_and_comparison_count_the_same_bytes():
    cluster, checked = Cluster.parse("64xH100"), 0
    for name, layout, weights, kv_cache, batch, length in random_layouts(200):
        model, work = get(name), Workload(prompt=length, output=16, concurrency=batch)
        space = _Space(model, cluster, work, VLLM, 1e15, kv_cache=kv_cache)
        memory = _RankMemory(space, layout, weights)
        held, stored, workspace, token = memory.row(batch)
        served = ServerSettings(weights, space.cache_of(weights), length + 16, batch, 8192)
        try:
            text = write("vllm", WriteRequest(model, layout, served=served, cluster=cluster)).text
        except LayoutError:
            continue
        told = serving(read([text]), model, None)
        assert (told.weights, told.workspace, told.a_token) == (stored, workspace, token), (name, layout)
        setup = ServingSetup(length + 16, batch, weights=weights, cache_type=space.cache_of(weights), engine=VLLM)
        each = [held_by(plan_of(model, layout, stage), setup) for stage in range(layout.pp)]
        assert held == max(one.total for one in each)
        checked += 1
    assert checked > 150


@pytest.mark.parametrize("words", ["int5", "", "fp8-block0x128", "int4-g", "x" * 500, "fp8 ", "int4-g32s", "nf4-block"])
def test_a_format_that_there_is_not_is_one_line(words):
    with pytest.raises(UserError) as error:
        weight_format(words)
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_a_format(form):
    stored = weight_format(form)
    assert stored.nbytes((4096, 8192)) == pytest.approx(stored.width * 4096 * 8192, rel=1e-3)
    assert stored.lossy == (stored.each < 2)


def test_types_of_the_cache():
    work = Workload(prompt=1000, output=100, concurrency=16)
    for asked, kept in (
        ("auto", {"bfloat16": "bfloat16", "float8_e4m3fn": "float8_e4m3fn"}),
        ("bf16", {}),
        ("fp8", {}),
    ):
        found = plan_serving("llama-3-8b", "1xH100", work, kv_cache=asked, top=100).ranked
        usual = "float8_e4m3fn" if asked == "fp8" else "bfloat16"
        assert all(
            one.cache == kept.get(one.weights, usual) for one in found if one.weights in ("bfloat16", "float8_e4m3fn")
        )
    with pytest.raises(UserError, match="--kv-cache must be one of auto, bf16, fp8"):
        plan_serving("llama-3-8b", "1xH100", work, kv_cache="int4")


def test_weights_that_are_asked_for_and_lossy_ones_named():
    work = Workload(prompt=1000, output=100, concurrency=16)
    found = plan_serving("llama-3-8b", "4xH100", work, weights=["bf16", "nvfp4"], top=500)
    assert {one.weights for one in found.ranked} == {"bfloat16", "nvfp4"}
    assert all(one.lossy == (one.weights == "nvfp4") for one in found.ranked)
    assert found.lossless is not None and not found.lossless.lossy
    assert "lossy" in found.conclusion() or not found.winner.lossy
    row = found.to_json()["ranked"][0]
    low, high = row["tokens_per_second_range"]
    assert low < row["tokens_per_second"] < high and low * high == pytest.approx(row["tokens_per_second"] ** 2)
    with pytest.raises(UserError, match="no format of weights 'fp7'"):
        plan_serving("llama-3-8b", "4xH100", work, weights=["fp7"])
