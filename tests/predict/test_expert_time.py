import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import table
from shardwise.cli.main import main
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.axes import EDP
from shardwise.layout.context import SequenceCut
from shardwise.layout.mesh import Mesh
from shardwise.model.catalog import get
from shardwise.model.config import Experts
from shardwise.model.flops import attention_flops_per_token, training_flops_per_token
from shardwise.model.operations import AttentionCore
from shardwise.predict.arguments import as_model
from shardwise.predict.context_balance import context_balance
from shardwise.predict.time import Pricing, ServedModel, ServingLayout, StepShape, engine, training_step
from shardwise.predict.time.constants import constants
from shardwise.predict.time.experts import RoutedLayer, exchange_seconds, experts_hit, grouped_seconds, places_of
from shardwise.predict.time.generation import DecodeStrategy

MIXTRAL, DEEPSEEK = get("mixtral-8x7b"), get("deepseek-v3")
TOKENS, ROWS = engine("megatron-bridge"), engine("megatron-bridge-alltoall")
TWO = Pricing(Cluster.parse("2x8xH100"))


def parts(model, split, software, pricing=TWO):
    return {name: float(part) for name, part in training_step(model, split, software, pricing).parts.items()}


@pytest.mark.parametrize(("count", "active", "places"), [(8, 2, 4), (8, 3, 2), (6, 1, 3), (12, 4, 6), (8, 2, 1)])
def test_places_of_a_tokens_experts_are_counted_over_all_choices(count, active, places):
    each = count // places
    hit = [len({expert // each for expert in chosen}) for chosen in combinations(range(count), active)]
    assert float(places_of(Experts(count, active, 64), places)) == pytest.approx(np.mean(hit))


def test_a_token_crosses_the_network_once_a_node_and_a_row_each_time():
    experts = Experts(256, 8, 2048)

    def seconds(software, ep):
        return float(exchange_seconds(experts, 4096, 7168, ep, software, TWO))

    rows, tokens = seconds(ROWS, 16), seconds(TOKENS, 16)
    network = TWO.cluster.inter.bandwidth
    # Half of the rows go to the other node; of the tokens, nearly all once.
    assert rows == pytest.approx(4096 * 7168 * 2.0 * 8 / 2 / (network * 0.72), rel=0.01)
    assert tokens == pytest.approx(4096 * 7168 * 2.0 / (network * 0.72), rel=0.01)
    assert seconds(ROWS, 1) == seconds(TOKENS, 1) == 0
    # Of no more than the link's bandwidth, inside a node, where most tokens have two experts on a rank.
    link = TWO.cluster.intra.bandwidth
    assert seconds(TOKENS, 8) > 4096 * 7168 * 2.0 * 4 / link
    assert seconds(ROWS, 8) > 4096 * 7168 * 2.0 * 7 / link


def test_the_exchange_of_arrays_is_that_of_numbers():
    split = StepShape(4096, micro=1, micro_batches=16, dp=16, zero=1, shard=16)
    for software in (TOKENS, ROWS):
        together = parts_of(split, software, np.array([1, 2, 4, 8, 16]))
        for place, ep in enumerate((1, 2, 4, 8, 16)):
            one = training_step(DEEPSEEK, replace(split, ep=ep), software, TWO).parts
            for name, part in one.items():
                assert np.broadcast_to(together[name], 5)[place] == pytest.approx(float(part), rel=1e-9), name


def parts_of(split, software, ep):
    return training_step(DEEPSEEK, replace(split, ep=ep), software, TWO).parts


def test_beside_another_micro_batch_an_exchange_takes_less_but_not_nothing():
    split = StepShape(4096, micro=1, micro_batches=16, dp=16, ep=16, zero=1, shard=16)
    alone, beside = (
        parts(MIXTRAL, split, replace(TOKENS, exchange_overlap=overlap))["experts"] for overlap in (False, True)
    )
    assert 0.1 * alone < beside < 0.6 * alone
    # What is longer than the computation beside it stays exposed.
    slow = Pricing(replace(TWO.cluster, inter=replace(TWO.cluster.inter, bandwidth=1e9)))
    alone, beside = (
        parts(MIXTRAL, split, replace(TOKENS, exchange_overlap=overlap), slow)["experts"] for overlap in (False, True)
    )
    assert 0.8 * alone < beside < alone


def test_recomputed_blocks_exchange_once_more():
    split = StepShape(4096, micro=1, micro_batches=16, dp=16, ep=16, zero=1, shard=16)
    none, full = (parts(MIXTRAL, replace(split, recompute=how), ROWS)["experts"] for how in ("none", "full"))
    assert full == pytest.approx(1.5 * none, rel=2e-3)  # experts' loads are told once, numbers of rows once more


def test_the_host_launches_experts_one_by_one_unless_they_are_captured():
    split = StepShape(1024, micro=1, micro_batches=16, dp=16, zero=1, shard=16)
    hosts = [parts(DEEPSEEK, replace(split, ep=ep), ROWS)["host"] for ep in (4, 16)]
    assert hosts[0] > 2 * hosts[1]
    captured = replace(ROWS, captured=("attention", "router", "experts"))
    assert parts(DEEPSEEK, replace(split, ep=4), captured)["host"] == 0
    some = parts(DEEPSEEK, replace(split, ep=16), replace(ROWS, captured=("attention", "router")))["host"]
    assert 0 < some < hosts[1]


def test_fused_experts_save_the_passes_of_narrow_types_alone():
    split = StepShape(4096, micro=1, micro_batches=16, dp=16, ep=16, zero=1, shard=16)
    for dtype, fewer in (("bfloat16", False), ("float8_e4m3fn", True)):
        apart, fused = (
            parts(MIXTRAL, replace(split, dtype=dtype), replace(TOKENS, fused_experts=how))["memory"]
            for how in (False, True)
        )
        assert (fused < apart) == fewer


def test_biases_of_experts_are_added_one_by_one():
    biased = MIXTRAL.replace(bias="all")
    split = StepShape(4096, micro=4, micro_batches=4, dp=16, ep=16, zero=1, shard=16)
    plain, apart = (parts(biased, split, replace(ROWS, biases_by_expert=how)) for how in (False, True))
    assert apart["memory"] > 1.1 * plain["memory"]
    assert apart["matmul"] == plain["matmul"]


@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK], ids=lambda model: model.name)
@pytest.mark.parametrize("name", ["megatron-bridge", "megatron-bridge-alltoall", "megatron-bridge-graphs", "shardwise"])
def test_no_step_is_faster_than_its_products_at_the_measured_rate(model, name):
    cluster = Cluster.parse("8x8xH100")
    split = StepShape(4096, micro=2, micro_batches=8, dp=64, ep=8, zero=1, shard=64)
    seconds = float(training_step(model, split, engine(name), Pricing(cluster)).seconds)
    flops = training_flops_per_token(model, 4096) * 16 * 4096
    assert seconds > flops / (0.67 * cluster.device.peak_flops["bfloat16"])


def test_a_network_that_is_not_known_is_an_error_where_tokens_cross_it():
    unknown = Pricing(replace(TWO.cluster, inter=replace(TWO.cluster.inter, bandwidth=None)))
    with pytest.raises(UserError, match="bandwidth of the network is not known"):
        exchange_seconds(Experts(8, 2, 64), 128, 64, 16, TOKENS, unknown)
    assert exchange_seconds(Experts(8, 2, 64), 128, 64, 8, TOKENS, unknown) > 0


@pytest.mark.parametrize(
    "text",
    ["dp=4,tp=2", "dp=4,tp=2,sp", "dp=4,tp=2,ep=2", "dp=4,tp=2,sp,ep=8", "dp=2,tp=2,cp=2,ep=4,zero=1", "dp=8,ep=4"],
)
def test_ranks_of_experts_are_those_of_the_mesh(text):
    layout = Layout.parse(text)
    split = StepShape.of(layout, Workload(seq=4096, batch=16))
    assert split.expert_tp == layout.expert_tp
    assert split.expert_data == Mesh(layout).size(EDP)


def test_however_tp_splits_experts_a_rank_has_as_much_to_do():
    split = StepShape(4096, micro=2, micro_batches=8, dp=8, tp=2, zero=1, shard=8)
    ways = [replace(split, sp=sp, ep=ep) for sp in (False, True) for ep in (1, 2)]
    times = [parts(MIXTRAL, way, ROWS) for way in ways]
    products = [time["matmul"] for time in times]
    assert max(products) < 1.1 * min(products)
    # Experts that tp splits need their tokens from all ranks, whole ones an exchange, and without sp a gather after it.
    no_sp, sp = (times[0], times[1]), (times[2], times[3])
    for whole, apart in (no_sp, sp):
        assert whole["experts"] == 0 < apart["experts"]
    assert sp[0]["tensor"] > 1.5 * sp[1]["tensor"]
    assert no_sp[1]["tensor"] > sp[1]["tensor"]
    # Without tp a rank routes its own tokens: nothing of the block is between tensor-parallel ranks.
    assert parts(MIXTRAL, replace(split, dp=16, tp=1, shard=16, ep=2), ROWS)["tensor"] == 0


# -- Routed experts of a served layer: one grouped launch, priced beside measured layers and the old kernel for each


H100 = Pricing(Cluster.parse("8xH100"))
TRT = engine("tensorrt-llm")
QWEN, DEEPSEEK_MEASURED, MIXTRAL_MEASURED = "qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"
BLOCKS = "fp8-block128x128"
MEASURED = table(__file__, "MEASURED")
"""(model, format, tp, tokens, lowest and highest milliseconds over routings) of one routed layer on an H100 under
TensorRT-LLM 1.3.0rc20: aiconfigurator-core 0.12.0, whose rows of these models no constant is fitted on."""


@pytest.mark.parametrize(("name", "weights", "tp", "tokens", "low", "high"), MEASURED)
def test_a_layer_is_within_a_third_of_its_measured_band(name, weights, tp, tokens, low, high):
    model = get(name)
    _, seconds = ServedModel(model, ServingLayout(weights, tp=tp), TRT, H100).decode_products(float(tokens))
    share = 1 - model.experts.dense_layers / model.layers if model.experts.dense_layers else 1.0
    assert 0.65 * low <= 1e3 * float(seconds) / share <= 1.45 * high  # with the router, shared experts and dense layers


@pytest.mark.parametrize("name", [QWEN, DEEPSEEK_MEASURED])
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
    seconds = float(ServedModel(model, ServingLayout("fp8"), TRT, H100).prefill(1.0, 200.0).seconds)
    assert seconds < 48 * 128 * 2 * 2.4e-6


def test_ranks_with_sequences_of_their_own_pay_for_the_way_to_the_experts():
    """Attention-dp: tp=1 and whole experts on eight ranks; each rank's tokens go to all and back."""
    apart = ServedModel(get(QWEN), ServingLayout("fp8", tp=1, ep=8, etp=1), TRT, H100).decode_step(16.0, 1000.0)
    alone = ServedModel(get(QWEN), ServingLayout("fp8"), TRT, H100).decode_step(16.0, 1000.0)
    assert "experts" in apart.parts and "experts" not in alone.parts
    assert float(apart.parts["experts"]) > 0 and float(apart.parts["tensor"]) == 0


# -- Attention's work per context-parallel rank, counted pair by pair


DEGREES = (2, 3, 4, 8)


def counted(cut: SequenceCut, rank: int, window: int) -> int:
    """Pairs of a rank's queries with the keys that a mask leaves them."""
    return sum(min(place + 1, window or place + 1) for run in cut.places(rank) for place in run)


def from_blocks(cut: SequenceCut, rank: int) -> int:
    pairs = 0
    for other in range(cut.cp):
        rows, columns, causal = cut.visible(rank, other)
        queries, keys = (len(range(cut.local)[part]) for part in (rows, columns))
        pairs += queries * (queries + 1) // 2 if causal else queries * keys
    return pairs


def layouts() -> Iterator[tuple[Layout, int]]:
    for cp in DEGREES:
        for kind in ("ring", "allgather"):
            for seq in (2 * cp, 8 * cp + 1, 1000 + cp, 8192):
                yield Layout(cp=cp, cpkind=kind), seq


@pytest.mark.parametrize(("layout", "seq"), list(layouts()), ids=str)
def test_zigzag_is_balanced_and_counts_the_blocks_that_run(layout: Layout, seq: int) -> None:
    model, cut = as_model("tiny-llama"), SequenceCut.of(layout, seq)
    balance = context_balance(model, layout, Workload(seq=seq, batch=1))
    core = AttentionCore(model.heads, model.kv_heads, model.head_dim, model.head_dim)
    pairs = [from_blocks(cut, rank) for rank in range(layout.cp)]
    assert list(balance.flops) == [model.layers * core.flops(one) for one in pairs]
    assert pairs == [counted(cut, rank, 0) for rank in range(layout.cp)]
    assert 1 <= balance.largest < 1.02
    assert sum(balance.flops) == cut.padded * attention_flops_per_token(model, cut.padded)


@pytest.mark.parametrize(("cp", "plain"), [(2, 1.5), (4, 1.75), (8, 1.875)])
@pytest.mark.parametrize("kind", ["ring", "ulysses", "allgather"])
def test_plain_cut_gives_the_last_rank_almost_twice_the_mean(cp: int, plain: float, kind: str) -> None:
    balance = context_balance(as_model("llama-3-8b"), Layout(cp=cp, cpkind=kind), Workload(seq=131_072, batch=1))
    assert balance.plain_largest == pytest.approx(plain, abs=1e-4)
    assert balance.plain_flops[-1] == max(balance.plain_flops)
    assert balance.largest == 1.0


def test_windows_are_counted() -> None:
    model = as_model("tiny-gemma2")
    seq = 4 * max(part.window for part in cores(model))
    layout = Layout(cp=4)
    balance = context_balance(model, layout, Workload(seq=seq, batch=1))
    cut = SequenceCut.of(layout, seq)
    for flops, one in ((balance.flops, cut), (balance.plain_flops, replace(cut, zigzag=False))):
        for rank in range(4):
            assert flops[rank] == sum(core.flops(counted(one, rank, core.window)) for core in cores(model))
    assert balance.largest < balance.plain_largest


def cores(model) -> list[AttentionCore]:
    from shardwise.model.parameters import blueprint

    parts = blueprint(model).parts
    return [op for part in parts for op in part.operations if op.kind == "attention" for _ in range(part.count)]


def test_estimate_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", "llama-3-8b", "--cluster", "8xH100", "--seq", "8192", "--batch", "8", "--layout"]
    assert main([*command, "cp=8", "--json"]) == 0
    balance = json.loads(capsys.readouterr().out)["balance"]
    assert len(balance["flops"]) == 8 and balance["largest_over_mean"] == 1.0
    assert main([*command, "cp=8"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "busiest rank" in line]
    assert lines == ["attention, busiest rank over the mean: 1.000 (zigzag), 1.875 in a plain cut"]
    assert main([*command, "dp=8", "--json"]) == 0
    assert "balance" not in json.loads(capsys.readouterr().out)
