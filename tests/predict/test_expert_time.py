"""The time of experts: tokens on their way, beside another micro-batch, and kernels launched expert by expert."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.axes import EDP
from shardwise.layout.mesh import Mesh
from shardwise.model.catalog import get
from shardwise.model.config import Experts
from shardwise.model.flops import training_flops_per_token
from shardwise.predict.time import Pricing, StepShape, engine, training_step
from shardwise.predict.time.exchange import exchange_seconds, places_of

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
    assert full == pytest.approx(1.5 * none)


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
