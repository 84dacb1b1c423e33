import json
import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.cli.show.explain_table import serving
from shardwise.cluster import Cluster
from shardwise.errors import LayoutError, UserError
from shardwise.interop import ServerSettings, WriteRequest, read
from shardwise.interop.writing.writer import write
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.layout.context import PageCut
from shardwise.layout.serving import check_generation, plan_of
from shardwise.model import ModelConfig
from shardwise.model.adapters import is_narrow
from shardwise.model.catalog import get, resolve
from shardwise.model.formats import FORMS, weight_format
from shardwise.model.lora import Lora
from shardwise.model.parameters import blueprint, count, parameters
from shardwise.planner.serving import _RankMemory, _Space, plan_serving
from shardwise.planner.strategies import Asked, compare
from shardwise.predict import estimate
from shardwise.predict.memory.servers import server_bytes
from shardwise.predict.memory.serving import (
    ServingSetup,
    fit_on_cluster,
    fit_on_host,
    page_bytes,
    serving_fit,
    stage_bytes,
    weight_bytes,
)
from shardwise.predict.time import engine
from shardwise.predict.time.requests import closed_loop
from shardwise.predict.time.serving import ServingLayout, cache_bytes_per_token

MODEL = ModelConfig("m", vocab=64, hidden=32, layers=6, heads=4, kv_heads=2, ffn=64, max_positions=512)
LLAMA = get("llama-3-70b")
SERVED = ServingSetup(64, 2)


def fit(text: str, served: ServingSetup = SERVED, room: float | None = None, model: ModelConfig = MODEL):
    return serving_fit(model, Layout.parse(text), served, room)


def test_weights_and_cache_are_those_of_the_plan():
    whole = fit("").held
    assert whole.weights == 2 * count(MODEL) and whole.slots == 0
    assert whole.cache == 2 * 64 * cache_bytes_per_token(MODEL, ServingLayout())
    assert fit("tp=2").held.cache == whole.cache / 2
    assert fit("tp=4").held.cache == whole.cache / 2  # two key/value heads: neighbours hold the same one
    assert fit("pp=3").held.cache == whole.cache / 3
    assert fit("precision=fp32").held.weights == 2 * whole.weights


def test_pages_are_cut_over_context_parallel_ranks():
    assert fit("cp=4").held.cache == fit("").held.cache / 4
    assert fit("tp=2,cp=2,pp=3").held.cache == fit("").held.cache / 12
    assert fit("cp=4").held.weights == fit("").held.weights
    with pytest.raises(
        LayoutError, match="cp=3 does not divide the cache's pages of 16 tokens; valid cp: 1, 2, 4, 8, 16"
    ):
        fit("cp=3")


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 100))
def test_every_token_of_a_sequence_is_on_one_rank(cp: int, slots: int, tokens: int):
    cut = PageCut(cp * slots, cp)
    owners = [position % cut.page // cut.slots for position in range(tokens)]
    assert [cut.held(rank, tokens) for rank in range(cp)] == [owners.count(rank) for rank in range(cp)]


def test_gathered_weights_keep_a_share_and_two_slots():
    held = fit("dp=4,zero=3").held
    assert held.weights == pytest.approx(2 * count(MODEL) / 4, rel=0.01)
    largest = max(unit.numel for unit in plan_of(MODEL, Layout()).units)
    assert 2 * largest <= held.slots <= 4 * largest


@pytest.mark.parametrize("tied", [False, True])
def test_int8_keeps_a_byte_a_weight_of_matrices_but_tables(tied):
    plan = plan_of(MODEL.replace(tied=tied), Layout())
    tables = {name for u in plan.units for name in (p.name for p in u.placed) if name.startswith("embedding.")}
    matrices = [p for u in plan.units for p in u.placed if p.name not in tables and len(p.shape) == 2]
    assert tied != any(p.name.startswith("head.") for p in matrices)
    saved = weight_bytes(plan) - weight_bytes(plan, weights="int8")
    assert saved == sum(p.numel - 2 * p.shape[0] for p in matrices)
    tiled = sum(-(-p.shape[0] // 48) * 48 * 512 + 12 * p.shape[0] for p in matrices)
    whole = weight_bytes(plan) - sum(2 * p.numel for p in matrices)
    assert weight_bytes(plan, weights="int8", cpu=True) == whole + tiled
    with pytest.raises(UserError, match="zero=0 with int8"):
        fit("dp=2,zero=3", ServingSetup(64, weights="int8"))


@given(
    st.sampled_from(["", "tp=2", "tp=4", "pp=2", "pp=3", "pp=3,stages=0/6/0", "tp=2,pp=2", "dp=2", "dp=3,zero=3",
                     "tp=2,dp=2,zero=3"]),
    st.floats(1e4, 3e6), st.integers(1, 5), st.integers(1, 33), st.booleans(), st.sampled_from(["", "float8_e4m3fn"]),
)  # fmt: skip
@example("tp=2", 1e6, 50, 16, False, "float8_e4m3fn")
def test_the_largest_that_fits_fits_and_one_page_more_does_not(text, room, batch, page, int8, cache):
    weights = "int8" if int8 and "zero" not in text else ""
    served = ServingSetup(64, batch, page, weights=weights, cache_type=cache)
    found = fit(text, served, room)
    if found.largest_context:
        assert fit(text, replace(served, context=found.largest_context), room).fits
    more = found.largest_context + page
    assert more > MODEL.max_positions or not fit(text, replace(served, context=more), room).fits
    if found.largest_batch:
        assert not fit(text, replace(served, batch=found.largest_batch + 1), room).fits
    assert found.fits == (found.held.total <= room)


def test_on_a_cluster_and_on_a_host():
    cluster = Cluster.parse("8xH100")
    split, whole = (fit_on_cluster(LLAMA, Layout.parse(text), ServingSetup(8192), cluster) for text in ("tp=8", ""))
    assert split.fits and not whole.fits
    assert split.largest_context == LLAMA.max_positions and split.tps == (1, 2, 4, 8, 16, 32, 64)
    assert "the weights alone take 141 GB" in whole.refusal() and "valid tp: 1, 2, 4" in "\n".join(whole.lines())
    assert "the largest context for 8 sequences is 8,192 tokens" in "\n".join(split.lines())
    assert fit_on_host(MODEL, Layout.parse("tp=2"), ServingSetup(64), 2_000_000).room == 1_000_000
    assert fit_on_host(MODEL, Layout.parse("tp=2"), ServingSetup(64), None).fits
    with pytest.raises(LayoutError, match="needs 16 ranks, but there are 8"):
        fit_on_cluster(LLAMA, Layout.parse("tp=16"), ServingSetup(8192), cluster)


def test_a_refusal_names_the_largest_context():
    found = fit("", ServingSetup(512, 2), 2 * count(MODEL) + 200_000)
    assert not found.fits and f"2 sequences is {found.largest_context:,} tokens" in found.refusal()
    assert 0 < found.largest_context < 512


def test_a_refusal_says_what_of_batch_context_and_weights_is_too_large():
    short, whole = (fit("", ServingSetup(context, 1)).held.total for context in (16, 512))
    many = fit("", ServingSetup(64, 20_000), fit("", ServingSetup(64, 100)).held.total)
    assert not many.largest_context and many.largest_batch == 100
    assert "no context fits 20,000 sequences, but 100 sequences of 64 tokens fit" in many.refusal()
    long = fit("", ServingSetup(512, 1), (short + whole) / 2)
    assert long.largest_context and not long.largest_batch
    assert f"{long.largest_context:,} tokens, and not even one sequence of 512 tokens fits" in long.refusal()
    assert "fewer sequences and a shorter context" in fit("", ServingSetup(512, 20_000), (short + whole) / 2).refusal()
    heavy = fit("", ServingSetup(64, 1), count(MODEL)).refusal()
    assert "the weights alone take" in heavy and "split them further" in heavy and "shorter" not in heavy


def test_positions_without_end_are_as_many_as_fit():
    far = fit("", ServingSetup(64, 2), 1e6, MODEL.replace(max_positions=10**30))
    assert (
        far.largest_context
        == fit("", ServingSetup(64, 2), 1e6, MODEL.replace(max_positions=1 << 20)).largest_context
        > 0
    )
    assert fit("", ServingSetup(64, 2), 1e3, MODEL.replace(max_positions=10**30)).largest_context == 0
    # A stage without blocks has no cache: those with blocks say how many fit.
    staged, rest = (f"pp=2,stages={MODEL.layers}/0", "pp=2")
    for text in (staged, rest):
        assert 0 < fit(text, ServingSetup(64, 2), 1e6, MODEL.replace(max_positions=10**30)).largest_context < 10**6


def test_numbers_that_make_no_sense():
    with pytest.raises(UserError, match="context must be at least 1, not 0"):
        ServingSetup(0)


# -- QLoRA's base in 4 bits, as `estimate` counts it


def test_a_base_in_4_bits_is_counted() -> None:
    """torchtune measured 7.9 GB for QLoRA of the 8B on a 24 GB card."""
    model = get("llama-3-8b").replace(lora=Lora.parse("rank=16,base=nf4"))
    maps = [p for p in blueprint(model).parameters() if is_narrow(p)]
    assert {p.dtype for p in maps} == {"nf4"} and count(model) == count(get("llama-3-8b").replace(lora=Lora(16)))
    workload = Workload(seq=2048, batch=1)
    report = estimate(model, Layout.parse("recompute=full"), workload, "1xRTX-4090")
    (role,) = report.roles
    numel = sum(p.numel for p in maps)
    others = count(model) - numel
    assert role.bytes.parameters == pytest.approx(numel * (0.5 + 1 / 64 + 4 / 64 / 256) + 2 * others, rel=1e-3)
    assert role.bytes.total == pytest.approx(7.9e9, rel=0.1)
    ranks = unit_plan(model, Layout.parse("dp=4,tp=2,zero=3"), Workload(seq=2048, batch=4)).units
    narrow = [unit for unit in ranks if unit.frozen and unit.dtype]
    assert sum(unit.padded for unit in narrow) == pytest.approx(numel * 0.515869 / 2, rel=1e-3)


# -- Means of a closed loop's requests


seconds = st.floats(1e-4, 1.0)


@given(seconds, seconds, seconds, st.integers(1, 300), st.integers(0, 300), st.integers(2, 2000), st.floats(0.1, 100))
def test_first_and_following_tokens_add_up_to_an_answer(token, read, busy, running, more, output, together):
    found = closed_loop(token, read, busy, float(running), float(running + more), output, together)
    assert found.first + (output - 1) * found.each == pytest.approx(found.answer)
    assert found.first >= read * (1 - 1e-9) and found.each >= token * (1 - 1e-9)


@given(seconds, seconds, seconds, st.integers(1, 100), st.integers(1, 50), st.integers(1, 500))
def test_waiting_follows_littles_law(token, read, busy, running, times, output):
    served = closed_loop(token, read, busy, float(running), float(running), output).answer
    waited = closed_loop(token, read, busy, float(running), float(times * running), output).answer
    assert waited == pytest.approx(times * served)


@given(seconds, seconds, seconds, st.integers(1, 300), st.integers(1, 300), st.integers(1, 2000), st.floats(1e-6, 0.1))
def test_a_front_end_streams_no_more_tokens_than_it_can(token, read, busy, running, more, output, stream):
    clients = float(running + more)
    free = closed_loop(token, read, busy, float(running), clients, output)
    late = closed_loop(token, read, busy, float(running), clients, output, stream=stream)
    assert late.answer == pytest.approx(max(free.answer, clients * output * stream))
    assert late.first + (output - 1) * late.each == pytest.approx(late.answer) if output > 1 else True
    assert late.first >= free.first * (1 - 1e-9) and late.each >= free.each * (1 - 1e-9)


def test_the_first_token_is_the_mean_clients_and_not_the_last_ones():
    one, many = (closed_loop(0.01, 0.4, 0.4, n, n, 500) for n in (1.0, 50.0))
    assert one.first == 0.4
    assert 0.4 < many.first < 50 * 0.4 / 4


# -- Memory of served models: one count for plans, explanations, comparisons and published rows, beside real servers


VLLM = engine("vllm")


def explained(command: str, model: str, cluster: str):
    return serving(read([command]), get(model), Cluster.parse(cluster))


def test_a_checkpoint_of_awq_has_the_bytes_of_its_files():
    told = explained("vllm serve x --quantization awq -tp 2", "llama-2-70b", "2xA100")
    assert told.weights == pytest.approx(18.3e9, rel=0.005)


@from_table
def test_room_for_the_cache_of_real_servers(command, model, cluster, gib, within):
    """Available KV cache memory, in GiB, in logs of vLLM."""
    told = explained(f"vllm serve x {command}", model, cluster)
    assert told.tokens * told.a_token / 2**30 == pytest.approx(gib, rel=within)


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
    """(model, layout, format of weights, type of the cache, sequences of a replica, tokens of a prompt)."""
    chance = random.Random(51)
    while count:
        name, tp, pp, dp = chance.choice(LAYOUTS), chance.choice((1, 2, 4, 8)), chance.choice((1, 2, 3, 4)), 1
        settings = chance.choice(("bf16", "fp8")), chance.choice(("auto", "fp8"))
        ep = 1
        if get(name).experts and chance.random() < 0.5:
            dp = chance.choice((1, 2, 4))
            ep = dp * tp
        try:
            layout = Layout(dp=dp, tp=tp, pp=pp, ep=ep)
            check_generation(layout, get(name))
        except UserError:
            continue
        count -= 1
        yield name, layout, *settings, chance.randrange(1, 64), chance.randrange(16, 4000)


def test_plan_explanation_and_comparison_count_the_same_bytes():
    cluster, compared, spread = Cluster.parse("128xH100"), 0, 0
    for i, (name, layout, weights, kv_cache, batch, length) in enumerate(random_layouts(200)):
        runtime = ("vllm", "sglang")[i % 2]
        priced = engine(runtime)
        model, work = get(name), Workload(prompt=length, output=16, concurrency=batch)
        space = _Space(model, cluster, work, priced, 1e15, kv_cache=kv_cache)
        memory = _RankMemory(space, layout, weights)
        held, stored, workspace, token = memory.row(batch)
        served = ServerSettings(weights, space.cache_of(weights), length + 16, batch, 8192, priced.cache_share)
        told = serving(
            read([write(runtime, WriteRequest(model, layout, served=served, cluster=cluster)).text]), model, None
        )
        assert (told.weights, told.workspace, told.a_token) == (stored, workspace, token), (name, layout)
        spread += layout.ep > 1
        if weights == "bf16" and kv_cache == "auto":
            asked = Asked(length, 16, batch * layout.dp)
            (one,) = compare(model, [layout], cluster, asked, runtime).strategies
            assert (one.fit.held.all_weights, one.fit.held.total) == (stored, held), (name, layout)
            compared += 1
    assert compared > 30 and spread > 20


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
    with pytest.raises(UserError, match="must be one of auto, bf16, fp8"):
        plan_serving("llama-3-8b", "1xH100", work, kv_cache="int4")


FILES = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("software", "named", "kept"),
    [("vllm", "FP8", "float8_e4m3fn"), ("vllm", None, "bfloat16"), ("tensorrt-llm", None, "bfloat16")],
)
def test_the_cache_has_the_type_that_a_models_files_name(tmp_path, software, named, kept):
    precision = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": named}
    (tmp_path / "config.json").write_text(json.dumps(FILES | {"quantization_config": precision}))
    work = Workload(prompt=1000, output=100, concurrency=16)
    for asked, cache in (("auto", kept), ("bf16", "bfloat16"), ("fp8", "float8_e4m3fn")):
        found = plan_serving(str(tmp_path), "1xH100", work, engine=software, kv_cache=asked).winner
        assert found.cache == cache
        served = ServerSettings(found.weights, found.cache, 1100, 16, 8192)
        text = write("vllm", WriteRequest(resolve(str(tmp_path)), found.layout, served=served)).text
        assert serving(read([text]), resolve(str(tmp_path)), None).cache == cache
    command = "vllm serve x --kv-cache-dtype"
    told = {
        words: serving(read([f"{command} {words}"]), resolve(str(tmp_path)), None).a_token for words in ("auto", "fp8")
    }
    assert told["auto"] / told["fp8"] == (1 if named else 2)


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


def test_the_precision_of_a_models_own_files_is_not_lossy():
    """DeepSeek-V3 was published in fp8; what is said of the catalog's name holds for the hub's."""
    found = plan_serving(
        "deepseek-v3",
        "16xH200",
        Workload(prompt=1000, output=100, concurrency=16),
        weights=["bf16", "fp8", "int4"],
        top=500,
    )
    assert {(one.weights, one.lossy) for one in found.ranked} >= {("float8_e4m3fn", False), ("int4", True)}
    own = plan_serving("deepseek-ai/DeepSeek-V3", "8xH200", Workload(prompt=1000, output=100, concurrency=16), top=500)
    assert {(one.weights, one.lossy) for one in own.ranked} == {("float8_e4m3fn", False)}


# -- Predictions of parameter servers without running them


MODEL_FIGURES = get("tiny-llama")


def test_a_server_grows_with_workers_and_the_bound() -> None:
    def held(text: str) -> int:
        layout = Layout.parse(text)
        return server_bytes(unit_plan(MODEL_FIGURES, layout, Workload(64, 2 * layout.dp)), 0).comm

    assert held("dp=2,sync=ps") < held("dp=4,sync=ps")
    assert held("dp=4,sync=ssp,staleness=0") == held("dp=4,sync=ps") < held("dp=4,sync=ssp,staleness=3")
    assert held("dp=4,sync=ps,servers=2") == pytest.approx(held("dp=4,sync=ps") / 2, rel=0.001)


def test_moments_are_on_the_servers_alone() -> None:
    report = estimate(MODEL_FIGURES, "dp=2,sync=ps,servers=1:own,precision=fp32", Workload(64, 4))
    worker, server = report.roles
    assert worker.ranks == (0, 1) and server.ranks == (2,)
    assert worker.bytes.optimizer == 0
    assert server.bytes.optimizer == pytest.approx(12 * sum(p.numel for p in parameters(MODEL_FIGURES)), rel=0.01)
    assert not server.ledger and {row.op for row in worker.ledger if row.axes == "server"} == {"push", "pull"}


def test_the_optimizer_decides_what_a_server_keeps() -> None:
    def kept(optimizer: str) -> int:
        work = Workload(64, 4, optimizer=optimizer)
        return estimate(MODEL_FIGURES, "dp=2,sync=ps,servers=1:own", work).roles[1].bytes.optimizer

    assert kept("adamw") == 3 * kept("sgd") and kept("momentum") == 2 * kept("sgd")
