from dataclasses import replace

import pytest

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.interop import ServerSettings, WriteRequest, read, write
from shardwise.layout import Layout, Workload
from shardwise.layout.experts import expert_spread
from shardwise.layout.serving import check_generation, plan_of
from shardwise.layout.units import UnitPlan
from shardwise.model.catalog import resolve
from shardwise.planner import serving
from shardwise.planner.serving import plan_serving
from shardwise.planner.strategies import Asked, compare
from shardwise.predict.time.generation import DecodeStrategy
from shardwise.predict.time.profiles import engine

MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite", "qwen3-235b-a22b")
WORK = Workload(prompt=512, output=128, concurrency=256)


def routed_bytes(plan: UnitPlan) -> int:
    return 2 * sum(p.numel for unit in plan.units for p in unit.placed if p.kind == "expert")


def only(monkeypatch, weights: str) -> None:
    monkeypatch.setattr(serving._Space, "types", [weights])


@pytest.mark.parametrize("nodes", [3, 5, 7, 9])
@pytest.mark.parametrize("name", MODELS)
def test_every_number_of_devices_plans(name, nodes, monkeypatch):
    only(monkeypatch, "bfloat16")
    model, devices = resolve(name), 8 * nodes
    plan = plan_serving(model, Cluster.parse(f"{nodes}x8xH100"), WORK, top=10_000)
    assert max(one.layout.ranks for one in plan.ranked) == devices
    degrees = {one.layout.ep for one in plan.ranked}
    assert max(degrees) >= max(ep for ep in range(1, devices + 1) if devices % ep == 0 and ep <= model.experts.count)
    for one in plan.ranked:
        if model.experts.count % one.layout.ep:
            assert "does not divide its" in plan.not_runnable(one)
            with pytest.raises(UserError, match="does not divide its"):
                check_generation(one.layout, model)


def test_a_published_decode_unit_plans(monkeypatch):
    """DeepSeek-V3 on 9 nodes of 8: attention-dp of 72, 256 experts and 32 redundant ones, 4 a rank."""
    only(monkeypatch, "float8_e4m3fn")
    model = resolve("deepseek-v3")
    plan = plan_serving(model, Cluster.parse("9x8xH800"), replace(WORK, concurrency=2048), top=10_000)
    units = [one for one in plan.ranked if one.layout == Layout(dp=72, ep=72)]
    assert units and {plan.spread(one) for one in units} == {(4, 40, 72)}
    row = plan._row(units[0])
    assert row["experts"] == {
        "most_of_a_rank": 4, "ranks_with_most": 40, "ranks": 72, "redundant_to_even": 32, "attention_replicas": 72,
    }  # fmt: skip
    assert "ep=72 does not divide its 256 experts" in row["not_runnable"]


@pytest.mark.parametrize(("count", "ep", "most", "full"), [(256, 72, 4, 40), (128, 24, 6, 8), (128, 8, 16, 8)])
def test_some_ranks_have_one_more(count, ep, most, full):
    spread = expert_spread(Layout(dp=ep, ep=ep), count)
    assert (spread.most, spread.full) == (most, full)
    assert full * most + (ep - full) * (most - 1) == count == most * ep - spread.redundant
    assert spread.even == (count % ep == 0)


def test_bytes_and_times_are_those_of_the_fullest_rank():
    model = resolve("qwen3-30b-a3b")
    one = routed_bytes(plan_of(model, Layout(dp=32, ep=32))) // 4
    for ep, held in ((16, 8), (24, 6), (32, 4), (40, 4), (56, 3), (64, 2), (72, 2)):
        assert routed_bytes(plan_of(model, Layout(dp=ep, ep=ep))) == held * one, ep
    cluster, software = Cluster.parse("8x8xH100"), engine("tensorrt-llm")
    strategies = {ep: DecodeStrategy(model, Layout(dp=ep, ep=ep), software, cluster) for ep in (32, 40, 48, 63, 64)}
    products = {ep: float(one.token(ep * 64, 1024).parts["weights"]) for ep, one in strategies.items()}
    # The fullest of 40 ranks has 4 experts, as each of 32, with a quarter more rows for each; of 63 3, where 64 have 2.
    assert products[32] < products[40] < 1.25 * products[32]
    assert products[64] < 0.9 * products[63]
    travel = {ep: float(one.token(ep * 64, 1024).parts["experts"]) for ep, one in strategies.items()}
    assert travel[32] < travel[40] < travel[48] < travel[64]


def test_this_runtime_is_not_offered_uneven_experts(monkeypatch):
    only(monkeypatch, "bfloat16")
    model = resolve("qwen3-30b-a3b")
    own = plan_serving(model, Cluster.parse("3x8xH100"), WORK, engine="shardwise-cpu", top=10_000)
    assert all(own.not_runnable(one) is None for one in own.ranked)
    assert any(one.layout.ep > 1 for one in own.ranked)
    with pytest.raises(UserError, match="ep=24 does not divide its 128 experts"):
        compare(model, [Layout(dp=24, ep=24)], Cluster.parse("3x8xH100"), Asked(512, 128))


@pytest.mark.parametrize(
    ("text", "tp", "redundant"), [("dp=24,ep=24", 24, 16), ("dp=6,tp=4,ep=24", 24, 16), ("dp=8,ep=8", 8, 0)]
)
def test_attention_dp_is_written_and_read(text, tp, redundant):
    layout = Layout.parse(text)
    request = WriteRequest(
        resolve("qwen3-30b-a3b"), layout, served=ServerSettings(sequences=11), cluster=Cluster.parse("3x8xH100")
    )
    file = write("sglang", request).text
    assert f"--tp-size {tp}" in file and "--enable-dp-attention" in file and f"--ep-size {layout.ep}" in file
    assert (f"--ep-num-redundant-experts {redundant}" in file) == bool(redundant)
    command = " ".join(line.rstrip("\\") for line in file.splitlines() if not line.startswith("#"))
    reading = read([command])
    assert (reading.layout, reading.served and reading.served.sequences) == (layout, 11)
    assert "--enable-expert-parallel" in write("vllm", request).text
