import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from shardwise.cluster import Cluster, Link
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import get
from shardwise.model.parameters import blueprint
from shardwise.planner.pricing import Prices, price_all, price_one
from shardwise.planner.space import RECOMPUTE, BatchChoice, LayoutColumns, ScheduleChoice, ZeroChoice
from shardwise.predict import estimate
from shardwise.predict.fixing import SCHEDULES
from shardwise.predict.step_seconds import StepTiming, step_seconds
from shardwise.predict.time import (
    ENGINES,
    Pricing,
    ServedModel,
    ServingLayout,
    StepShape,
    engine,
    profiles,
    time_range,
    training_step,
)
from shardwise.predict.time.block import Shape, tally_part
from shardwise.predict.time.network import _worth_asking
from shardwise.predict.time.pieces import Pieces, pieces, total
from shardwise.predict.time.split import held_of
from shardwise.predict.time.step import bubble_share, exposed_messages, link_seconds
from shardwise.schedule.choose import pricer
from shardwise.schedule.pipeline import build, find
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times

GPT, LLAMA = get("megatron-22b"), get("llama-3-8b")
POWERS = st.sampled_from([1, 2, 4, 8])


def seconds(split: StepShape, name: str = "megatron-bridge", cluster: str = "8x8xH100", model=LLAMA) -> float:
    return float(training_step(model, split, engine(name), Pricing(Cluster.parse(cluster))).seconds)


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.tuples(POWERS, POWERS, POWERS, st.integers(1, 8), st.integers(1, 32)), min_size=2, max_size=6),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from([0, 1, 3]),
)
def test_arrays_are_numbers(rows, recompute, zero):
    tp, pp, dp, micro, count = (np.array(column) for column in zip(*rows, strict=True))
    pricing = Pricing(Cluster.parse("64x8xA100"))
    base = StepShape(2048, recompute=recompute, zero=zero)
    arrays = replace(base, tp=tp, pp=pp, dp=dp, micro=micro, micro_batches=count, shard=dp)
    together = training_step(GPT, arrays, engine("megatron-lm-2022"), pricing).seconds
    for place, (t, p, d, m, n) in enumerate(rows):
        alone = replace(base, tp=t, pp=p, dp=d, micro=m, micro_batches=n, shard=d)
        one = training_step(GPT, alone, engine("megatron-lm-2022"), pricing).seconds
        assert together[place] == pytest.approx(float(one), rel=1e-9)


def test_many_candidates_are_each_priced_as_alone():
    # Above 64 candidates, blocks are computed once for each combination of what they depend on.
    random = np.random.default_rng(7)
    tp, pp, dp, micro, count = (2 ** random.integers(0, most, 500) for most in (3, 3, 3, 3, 6))
    pricing = Pricing(Cluster.parse("8x8xA100"))
    base = StepShape(2048, recompute="selective", sp=True)
    arrays = replace(base, tp=tp, pp=pp, dp=dp, micro=micro, micro_batches=count)
    together = training_step(GPT, arrays, engine("megatron-lm-2022"), pricing)
    for i in range(0, 500, 25):
        alone = replace(base, tp=tp[i], pp=pp[i], dp=dp[i], micro=micro[i], micro_batches=count[i])
        one = training_step(GPT, alone, engine("megatron-lm-2022"), pricing)
        for name, part in one.parts.items():
            assert np.broadcast_to(together.parts[name], 500)[i] == pytest.approx(float(part), rel=1e-9), name


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_parts_add_up(name):
    split = StepShape(4096, micro=1, micro_batches=8, tp=2, pp=2, dp=4, zero=1, shard=4, sp=True)
    step = training_step(LLAMA, split, engine(name), Pricing(Cluster.parse("2x8xH100")))
    assert sum(step.parts.values()) == pytest.approx(float(step.seconds))
    assert all(float(part) >= 0 for part in step.parts.values())


def test_recompute_costs_time():
    none, selective, full = (
        seconds(StepShape(2048, micro_batches=4, tp=8, recompute=kind), "megatron-lm-2022", "8xA100", GPT)
        for kind in ("none", "selective", "full")
    )
    assert none < selective < full
    assert 1.2 < full / none < 1.45


def test_the_bubble_of_1f1b():
    # p - 1 micro-batches of m + p - 1, at equal stages: reference costs, (p - 1)(F + B).
    model = LLAMA.replace(vocab=512)
    step = training_step(
        model, StepShape(4096, micro_batches=16, pp=4), engine("megatron-bridge"), Pricing(Cluster.parse("4xH100"))
    )
    busy = sum(float(part) for name, part in step.parts.items() if name in ("matmul", "attention", "memory"))
    assert float(step.parts["bubble"]) == pytest.approx(busy * 3 / 16, rel=0.02)
    chunked = training_step(
        model,
        StepShape(4096, micro_batches=16, pp=4, virtual=4),
        engine("megatron-bridge"),
        Pricing(Cluster.parse("4xH100")),
    )
    assert float(chunked.parts["bubble"]) == pytest.approx(float(step.parts["bubble"]) / 4, rel=0.02)


def test_the_host_is_waited_for_where_nothing_is_captured():
    tiny = LLAMA.replace(hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=1024, vocab=512)
    split, pricing = StepShape(256), Pricing(Cluster.parse("1xH100"))
    assert float(training_step(tiny, split, engine("llm-foundry"), pricing).parts["host"]) > 0
    assert float(training_step(tiny, split, engine("megatron-bridge"), pricing).parts["host"]) == 0


def test_the_fused_softmax_needs_enough_heads():
    # Two heads a rank do not fill a block of the fused kernel; sequences of a micro-batch make up for it.
    pricing = Pricing(Cluster.parse("8xA100"))
    model = GPT.replace(heads=16, kv_heads=16, head_dim=128, hidden=2048, ffn=8192)
    alone, pair = (
        float(training_step(model, StepShape(1024, micro=m, tp=8), engine("megatron-lm-2022"), pricing).parts["memory"])
        for m in (1, 2)
    )
    assert alone > 0.6 * pair


def test_a_layout_makes_a_split():
    layout = Layout.parse("dp=2,tp=2,pp=2,zero=1,sp,micro=2,recompute=full")
    split = StepShape.of(layout, Workload(seq=4096, batch=64))
    assert (split.micro_batches, split.shard, split.dtype) == (16, 2, "bfloat16")
    with pytest.raises(UserError, match="cannot be divided"):
        StepShape.of(layout, Workload(seq=4096, batch=63))


def test_every_fact_of_a_profile_can_be_read_somewhere():
    for profile in ENGINES.values():
        fields = {name for name in type(profile).__dataclass_fields__ if name not in ("name", "facts", "features")}
        assert fields == set(profile.facts), f"{profile.name}: {fields ^ set(profile.facts)}"
        assert all(profile.facts.values())
        features = profile.features
        if not profile.facts["optimizer_bytes"].startswith("not used"):
            assert {field for field in type(features).__dataclass_fields__ if field != "sources"} == set(
                features.sources
            )
            assert all(features.sources.values())


def test_an_unknown_profile_names_the_nearest():
    with pytest.raises(UserError, match="did you mean megatron-bridge"):
        engine("megatron-brige")


def test_the_range_holds_the_time_and_widens_with_what_is_assumed():
    pricing = Pricing(Cluster.parse("8x8xH100"))
    step = training_step(LLAMA, StepShape(4096, dp=64, zero=3, shard=64), engine("llm-foundry"), pricing)
    around, wider = (time_range(step.parts, pricing.constants, assumed) for assumed in (0, 4))
    assert around.low < step.seconds < around.high
    assert wider.width > around.width


def test_context_parallelism_divides_the_products_of_attention():
    # Of a block's attention in seconds; latency and traffic of keys are not divided.
    def attention(cp: int) -> float:
        shape = Shape(1, 131072 / cp, 1, 131072 / cp, 131072)
        kernels = Pricing(Cluster.parse("8xH100")).kernels
        _, block, _ = blueprint(LLAMA).parts
        return float(tally_part(block, LLAMA, shape, engine("megatron-bridge"), kernels).forward["attention"])

    whole = attention(1)
    for cp in (2, 4, 8):
        assert attention(cp) == pytest.approx(whole / cp, rel=0.02)


def test_each_kind_of_context_parallelism_has_its_own_messages():
    pricing = Pricing(Cluster.parse("8xH100"))

    def inside(**changes) -> float:
        split = StepShape(65536, cp=8, **changes)
        return float(training_step(LLAMA, split, engine("shardwise"), pricing).parts["tensor"])

    merges = replace(engine("shardwise"), ring_bytes=(0.0, 0.0))

    def inside_alone(**changes) -> float:
        split = StepShape(65536, cp=8, **changes)
        return float(training_step(LLAMA, split, merges, pricing).parts["tensor"])

    gathered, exchanged = inside_alone(cpkind="allgather"), inside(cpkind="ulysses")
    assert inside_alone() < gathered < inside(cpkind="allgather"), "a ring's messages have attention beside them"
    # Elements per token, as the ledger has them: gathered 2 x 8 key/value heads thrice, the third time in fp32, by ring
    # volume; exchanged 32 + 2 x 8 and 32 heads, twice.
    price, head = pricing.collectives.seconds, 65536 * 128 * 2.0
    gathers = 2 * price("all_gather_into", 16 * head, 8) + price("reduce_scatter", 32 * head, 8)
    assert gathered == pytest.approx(LLAMA.layers * gathers, rel=1e-9)
    exchanges = 2 * (price("all_to_all", 48 * head / 8, 8) + price("all_to_all", 32 * head / 8, 8))
    assert exchanged == pytest.approx(LLAMA.layers * exchanges, rel=1e-9)
    assert inside(cpkind="ulysses", recompute="full") == pytest.approx(1.5 * exchanged)


def test_a_compiled_ring_waits_for_its_messages():
    """A traced collective is waited for where it is sent, so that no attention runs beside it."""
    pricing = Pricing(Cluster.parse("8xH100"))

    def inside(name: str) -> float:
        return float(training_step(LLAMA, StepShape(65536, cp=8), engine(name), pricing).parts["tensor"])

    merged = replace(engine("torchtitan-compiled"), ring_bytes=(0.0, 0.0))
    messages = link_seconds(LLAMA, StepShape(65536, cp=8), merged, pricing)["tensor"]
    alone = float(training_step(LLAMA, StepShape(65536, cp=8), merged, pricing).parts["tensor"])
    assert alone == pytest.approx(float(messages)) and inside("torchtitan-compiled") > inside("torchtitan") > 0


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_a_candidate_costs_the_same_alone_in_a_column_and_by_estimate(name):
    software, cluster, workload = engine(name), Cluster.parse("8xH100"), Workload(seq=2048, batch=16)
    rows = [BatchChoice(1, sp, recompute, micro) for sp in (False, True) for recompute in RECOMPUTE for micro in (1, 2)]
    frame = LayoutColumns(
        2, 2, 2, "sdpa", 16, LLAMA.layers, tuple(rows), (ZeroChoice(1, 2), ZeroChoice(2, 2)),
        tuple(ScheduleChoice(schedule, 1 + (schedule == "interleaved")) for schedule in SCHEDULES),
    )  # fmt: skip
    pricing = Pricing(cluster)
    column = np.broadcast_to(Prices(LLAMA, workload, "sdpa", pricing, [frame]).seconds(frame, software), frame.shape)
    chosen = [(r, s, (r + s) % len(frame.orders)) for r in range(len(rows)) for s in range(2)]
    layouts = [frame.layout(rows[r], frame.shardings[s], frame.orders[o]) for r, s, o in chosen]
    together = price_all(LLAMA, [(layout, software) for layout in layouts], workload, pricing)
    for (r, s, o), layout, among in zip(chosen, layouts, together, strict=True):
        alone = price_one(LLAMA, layout, workload, software, pricing).seconds
        assert alone == pytest.approx(step_seconds(LLAMA, layout, workload, cluster, name).seconds, rel=1e-12)
        assert alone == pytest.approx(among.seconds, rel=1e-12)
        assert alone == pytest.approx(float(column[r, s, o]), rel=1e-12)


def test_norms_that_are_not_fused_cost_a_pass_for_each_operation():
    # decoder/modules.py, rms_norm and its backward, which took 25 ms of a step. One H100, measured: eager steps of
    # llama-3.2-1b, 8,192 tokens, with ops/cuda/norm.py in 152.4 ms (benchmarks/results/gpu_train.json).
    pricing, model = Pricing(Cluster.parse("1xH100")), get("llama-3.2-1b")
    split, own = StepShape(4096, micro=2), engine("shardwise")
    whole, fused = (
        float(training_step(model, split, software, pricing).seconds)
        for software in (replace(own, fused_norm=False), own)
    )
    assert fused == pytest.approx(0.1524, rel=0.1)
    assert 0.01 < whole - fused < 0.03
    # A layer norm is torch's own kernel.
    gpt = [
        float(training_step(GPT, split, software, pricing).seconds)
        for software in (replace(own, fused_norm=False), own)
    ]
    assert gpt[0] == gpt[1]


def test_what_goes_packed_saves_time_over_a_slow_network_alone() -> None:
    """100 Mb/s between two nodes of two: all of ZeRO++ sends less than half, and what it computes takes no part of
    that. Over NVLink packing costs more than it saves."""
    slow = replace(Cluster.parse("2x2xH100"), inter=Link(20e-6, 12.5e6))
    workload, plain = Workload(1024, 8), Layout(dp=4, zero=3)

    def data(layout: Layout, cluster: Cluster) -> float:
        return step_seconds(get("tiny-llama"), layout, workload, cluster).parts["data"]

    ways = [plain, replace(plain, qwz=True), replace(plain, hpz=2), replace(plain, hpz=2, qwz=True)]
    ways += [replace(ways[-1], qgz=True)]
    assert [data(layout, slow) for layout in ways] == sorted([data(layout, slow) for layout in ways], reverse=True)
    assert data(ways[-1], slow) < data(plain, slow) / 3
    near = Cluster.parse("4xH100")
    assert data(replace(plain, qgz=True), near) > data(plain, near)


# -- The bubbles that the time of a step takes for a schedule, against schedules simulated action by action


SECONDS = [(2.0, 2.0, 1.0), (3.0, 4.0, 2.0), (1.0, 1.0, 1.0), (1.0, 1.0, 3.0), (4.0, 1.0, 2.0), (1.0, 5.0, 2.0)]
"""Forward, input gradient, weight gradient of all chunks of a rank."""


def idle(name: str, p: int, m: int, v: int, seconds: tuple[float, float, float]) -> float:
    schedule = build(name, p, m, v)
    return max(simulate(schedule, Times.equal(schedule.stages, *(each / v for each in seconds))).idle)


def share(name: str, v: int, seconds: tuple[float, float, float]) -> float:
    forward, rest, weights = seconds
    pieces = Pieces({"matmul": forward + rest + weights, "host": 0.0}, {}, {}, forward, weights)
    return float(bubble_share(name, v, pieces))


@pytest.mark.parametrize("name", SCHEDULES)
def test_shares_are_those_of_simulated_schedules(name):
    exact = 0
    for p, m, seconds in product((2, 3, 4), (1, 2, 4, 8, 9), SECONDS):
        for v in (1, 2, 3):
            if find(name).objection(p, m, v) or (name in ("interleaved", "zb-h1") and m < p):
                continue
            told = share(name, v, seconds) * idle("1f1b", p, m, 1, seconds)
            assert told == pytest.approx(idle(name, p, m, v, seconds)), (p, m, v, seconds)
            exact += 1
    assert exact > 20


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_beside_computation_take_what_a_simulation_says(name):
    v = 3 if name == "interleaved" else 1
    for p, rounds, hop in product((2, 3, 4, 8), (1, 2, 6), (0.05, 0.6, 1.5, 2.5)):
        m, hop = rounds * p, min(hop, 1.2) / v if v > 1 else hop
        split = StepShape(1, pp=p, micro_batches=m, virtual=v, schedule=name)
        told = exposed_messages(split, hop, 3.5, 1.0, 1.0, near=False)
        schedule, times = build(name, p, m, v), Times.equal(p * v, 1 / v, 1.5 / v, 1 / v)
        alone, real = (simulate(schedule, each).makespan for each in (times, times.with_hop(hop)))
        assert alone + told == pytest.approx(real, rel=0.025), (p, m, hop)


@pytest.mark.parametrize(
    "text", ["dp=16,zero=3", "dp=2,tp=8,zero=3,sp", "dp=8,pp=2,zero=1", "tp=8,pp=2,sp", "tp=16,sp", "tp=16"]
)
def test_no_step_is_shorter_than_its_traffic_over_a_slow_network(text):
    cluster, workload = Cluster.parse("2x8xH100").with_network("10Gb"), Workload(4096, 64)
    step = step_seconds(LLAMA, Layout.parse(text), workload, cluster)
    one_way = step.links | {"pipeline": step.links["pipeline"] / 2}
    assert step.seconds > max(one_way.values())


def test_arrays_are_numbers_schedules():
    rows = [(3.0, 4.0, 2.0), (1.0, 1.0, 3.0)]
    forward, rest, weights = (np.array(column) for column in zip(*rows, strict=True))
    pieces = Pieces({"matmul": forward + rest + weights, "host": 0.0}, {}, {}, forward, weights)
    assert bubble_share("zb-h1", 1, pieces).tolist() == [share("zb-h1", 1, row) for row in rows]


def test_a_schedule_without_closed_form_is_refused():
    with pytest.raises(UserError, match="schedule=zb-v has no closed form; there is one for 1f1b"):
        share("zb-v", 2, (1.0, 1.0, 1.0))


# -- Collectives in the time of a step: what is left out to be quick changes no price


@from_table
def test_algorithms_that_are_not_asked_are_never_the_cheapest(cluster, op, ranks, stride):
    on = Cluster.parse(cluster)
    prices = pricer(op, tuple(i * stride for i in range(ranks)), on, sharing=stride)
    asked = [found.name for found in prices.candidates if _worth_asking(found, ranks, False)]
    assert len(asked) < len([found for found in prices.candidates if not found.reads])
    for nbytes in (1e3, 1e5, 1e7, 1e9, 1e11):
        mine = min(prices.pick(nbytes, name)[1].seconds for name in asked)
        assert mine == pytest.approx(prices.pick(nbytes, "best")[1].seconds, rel=1e-12)


def test_groups_with_the_same_links_have_one_price():
    price = Pricing(Cluster.parse("64x8xH100")).collectives.seconds
    assert price("all_reduce", 1e8, 4, 1) == price("all_reduce", 1e8, 4, 2)
    assert price("all_gather_into", 1e8, 8, 8) == price("all_gather_into", 1e8, 8, 64)
    assert price("all_gather_into", 1e8, 8, 8) > price("all_gather_into", 1e8, 8, 1)


# vllm-project/vllm issue 50576: 8 A800 in two PCIe 4.0 islands, microseconds by NCCL and by the faster of two kernels.
OVER_PCIE = [(8192, 56.9, 46.5), (32768, 95.8, 45.6), (65536, 49.8, 52.9), (262144, 169.4, 91.2)]


def test_all_reduces_over_pcie_cost_what_was_measured_there():
    price = Pricing(Cluster.parse("8xA100-80GB-PCIe")).collectives.seconds
    predicted = [1e6 * float(price("all_reduce", nbytes, 8)) for nbytes, _, _ in OVER_PCIE]
    off = [np.log(mine / nccl) for mine, (_, nccl, _) in zip(predicted, OVER_PCIE, strict=True)]
    # NCCL itself takes twice as long for 32 kB as for 64 kB: no price is closer than that to all of them.
    assert abs(np.mean(off)) < 0.15 and max(map(abs, off)) < np.log(2)
    assert all(40 < mine < 180 for mine in predicted)


def test_all_reduces_over_infiniband_are_as_fast_as_was_measured_on_two_nodes():
    # NVIDIA/nccl issue 1048: two nodes of 8 A100, 4 links of 200 Gb/s each: 86 GB/s of bus bandwidth.
    nodes = replace(Cluster.parse("2x8xA100"), inter=Link(None, 12.5e9, kind="network"))
    seconds = float(Pricing(nodes).collectives.seconds("all_reduce", 4e9, 16))
    assert 2 * 15 / 16 * 4 / seconds == pytest.approx(86, rel=0.05)


def test_over_omni_path_rings_reach_less_of_the_bandwidth():
    # bigscience, all_reduce_bench-a100-n4: 40.5 Gb/s over a link of 100 Gb/s.
    nodes = replace(Cluster.parse("4x8xA100"), inter=Link(None, 6.25e9, kind="omni-path"))
    seconds = float(Pricing(nodes).collectives.seconds("all_reduce", 1e9, 4, 8))
    assert 2 * 3 / 4 * 1e9 * 8 * 8 / seconds / 4 == pytest.approx(40.5e9, rel=0.01)


def test_gpus_behind_one_switch_are_nearer_than_through_the_host():
    # haohervchb/sglang-V100 PR 2: 4 GPUs behind one PCIe switch, NCCL, 8 and 16 KB in 20.3 and 22.3 us.
    host = Cluster.parse("4xA100-80GB-PCIe")
    switch = replace(host, intra=replace(host.intra, kind="pcie"))
    near, far = (Pricing(on).collectives.seconds for on in (switch, host))
    assert 1e6 * float(near("all_reduce", 8192, 4)) == pytest.approx(20.3, rel=0.3)
    assert float(far("all_reduce", 8192, 4)) > 1.5 * float(near("all_reduce", 8192, 4))
    assert float(far("all_reduce", 1e9, 4)) > float(near("all_reduce", 1e9, 4))


def test_a_published_decode_over_pcie():
    # mlc-ai's multi-GPU benchmark: Llama-2-70B in fp16, tp=4 on A100 PCIe, batch 1: 26.6 tokens/s.
    pricing, model = Pricing(Cluster.parse("4xA100-80GB-PCIe")), get("llama-2-70b")
    for software in ("gpt-fast", "tensorrt-llm"):
        step = ServedModel(model, ServingLayout(tp=4), engine(software), pricing).decode_step(1.0, 400)
        assert 1 / float(step.seconds) == pytest.approx(26.6, rel=0.2)


def test_peers_are_read_over_nvlink_inside_a_node_alone():
    def prices(cluster: str, ranks: int) -> tuple[float, float]:
        price = Pricing(Cluster.parse(cluster)).collectives.seconds
        return tuple(float(price("all_reduce", 16384, ranks, reads_peers=reads)) for reads in (False, True))

    library, read = prices("2x8xA100", 4)
    assert read < 0.6 * library
    for cluster, ranks in (("2x8xA100", 16), ("4xA100-80GB-PCIe", 4), ("4xL40S", 4), ("4xA100", 1)):
        library, read = prices(cluster, ranks)
        assert read == library
    assert float(Pricing(Cluster.parse("4xA100")).collectives.seconds("all_gather", 4096, 4, reads_peers=True)) > 0


def test_a_link_of_unknown_kind_counts_by_its_speed():
    known = Cluster.parse("8xA100")
    slow, fast = (replace(known, intra=Link(None, bandwidth)) for bandwidth in (25e9, 250e9))
    assert slow.over_pcie and not fast.over_pcie and not known.over_pcie
    priced = [float(Pricing(on).collectives.seconds("all_reduce", 16384, 8)) for on in (slow, fast, known)]
    assert priced[0] > 2.5 * priced[2] and priced[1] < 1.2 * priced[2]


# -- Predictions of `sync=local` without running it: what an outer step takes, and over which links it goes


MODEL, WORK = get("llama-3-8b"), Workload(4096, 64)
NEAR = Cluster.parse("2x8xH100")
FAR = replace(NEAR, inter=replace(NEAR.inter, bandwidth=1e9 / 8))
"""The same nodes with 1 Gbit/s between them."""
LOCAL = "dp=16,zero=3,replicas=2,sync=local,recompute=full"


def timing(words: str, cluster: Cluster = NEAR) -> StepTiming:
    return step_seconds(MODEL, Layout.parse(f"{LOCAL},{words}"), WORK, cluster)


def test_a_step_has_its_share_of_an_outer_step() -> None:
    ten, hundred = timing("every=10"), timing("every=100")
    assert ten.parts["outer"] == pytest.approx(10 * hundred.parts["outer"])
    assert {k: v for k, v in ten.parts.items() if k != "outer"} == {
        k: v for k, v in hundred.parts.items() if k != "outer"
    }
    assert ten.seconds == pytest.approx(sum(ten.parts.values())) and ten.low < ten.seconds < ten.high
    assert "mean of a round" in ten.notes[-1]


def test_a_slow_link_between_replicas_costs_outer_steps_alone() -> None:
    near, far = timing("every=50,outer=nesterov"), timing("every=50,outer=nesterov", FAR)
    assert near.parts["data"] == far.parts["data"]
    assert far.parts["outer"] > 10 * near.parts["outer"]
    # 4 bytes of each of 8 billion parameters between two nodes, over 8 links of 1 Gbit/s, of which training runs reach
    # a share.
    least = 8.03e9 / 8 * 4 * 8 / 1e9
    assert least < far.parts["outer"] * 50 < 3 * least
    lockstep = step_seconds(MODEL, Layout.parse("dp=16,zero=3,shard=8,recompute=full"), WORK, FAR)
    assert lockstep.seconds > 2 * far.seconds


def test_few_bits_cost_less_where_the_link_is_slow() -> None:
    seconds = [timing(f"every=50,outer=nesterov,outer_bits={bits}", FAR).parts["outer"] for bits in (0, 8, 4)]
    # Twice on the wire, by an all-to-all and an all-gather; in 8 bits a quarter of the bytes each way, in 4 an eighth.
    assert seconds[0] > 1.5 * seconds[1] > 2.5 * seconds[2]


def test_an_estimate_says_which_step_it_is_of() -> None:
    report = estimate(MODEL, f"{LOCAL},every=50,outer=nesterov", WORK, NEAR)
    assert any("one in 50" in note for note in report.notes)
    rows = [row for role in report.roles for row in role.ledger if row.axes == "replica"]
    assert sum(row.payload_bytes for row in rows) == pytest.approx(8.03e9 / 8 * 4, rel=0.01)
    plain = estimate(MODEL, "dp=16,zero=3,shard=8,recompute=full", WORK, NEAR)
    extra = report.roles[0].bytes.optimizer - plain.roles[0].bytes.optimizer
    assert extra == pytest.approx(8.03e9 / 8 * 8, rel=0.01)


# -- Profiles of engines are parsed one by one, and are those of the whole file


def test_each_profile_is_its_table_of_the_file():
    tables = tomllib.loads(Path(profiles.__file__).with_name("engines.toml").read_text(encoding="utf-8"))
    assert list(ENGINES) == list(tables) and len(ENGINES) == len(tables)
    for name, table in tables.items():
        profile = ENGINES[name]
        assert profile.name == name
        rows = {key: row for key, row in table.items() if key not in ("base", "unlisted", "features")}
        assert {key: profile.facts[key] for key in rows} == {key: source for key, (_, source) in rows.items()}
        for key, (value, _) in rows.items():
            assert getattr(profile, key) == (tuple(value) if isinstance(value, list) else value)
        for key, (value, source) in table.get("features", {}).items():
            assert getattr(profile.features, key) == (tuple(value) if isinstance(value, list) else value)
            assert profile.features.sources[key] == source
        if "base" in table:
            base, own = ENGINES[table["base"]], {"name", "features", "facts", *rows}
            assert all(getattr(profile, key) == getattr(base, key) for key in vars(base).keys() - own)


def test_only_what_is_used_is_parsed():
    fresh = profiles._Profiles()
    assert fresh["shardwise"] == ENGINES["shardwise"]
    assert len(fresh._parsed) < len(fresh) // 4


CHOSEN_STAGES = (
    ("1f1b", ()), ("1f1b", (8, 8, 8, 8)), ("1f1b", (9, 9, 9, 5)), ("1f1b", (29, 1, 1, 1)), ("1f1b", (0, 16, 16, 0)),
    ("interleaved", (5, *(4,) * 6, 3)), ("interleaved", (2, *(3,) * 10, 0)), ("zb-h1", (8, 8, 8, 8)),
    ("zb-h1", (8, 9, 9, 6)),
)  # fmt: skip


@pytest.mark.parametrize(("schedule", "stages"), CHOSEN_STAGES)
def test_chosen_stages_take_what_their_schedule_takes(schedule: str, stages: tuple[int, ...]) -> None:
    pricing, software = Pricing(Cluster.parse("4xH100")), replace(engine("megatron-core"), graphs=True)
    virtual, held = max(1, len(stages) // 4), held_of(stages, 4) if stages else None
    split = StepShape(2048, micro_batches=8, pp=4, virtual=virtual, schedule=schedule, held=held)
    found, layers = pieces(LLAMA, split, software, pricing), stages or (8,) * 4
    one, loss, first = (float(total(part, "host")) for part in (found.block, found.last, found.first))
    weights = [count * float(found.weights) * (schedule == "zb-h1") for count in layers]
    forward = [count * float(found.forward) for count in layers]
    backward = [count * (one - float(found.forward)) - later for count, later in zip(layers, weights, strict=True)]
    backward[0], backward[-1] = backward[0] + first, backward[-1] + loss
    times = Times(tuple(forward), tuple(backward), tuple(weights))
    parts = training_step(LLAMA, split, software, pricing).parts
    taken = sum(float(seconds) for name, seconds in parts.items() if name not in ("optimizer", "pipeline", "data"))
    assert taken == pytest.approx(simulate(build(schedule, 4, 8, virtual), times).makespan, rel=0.05)
