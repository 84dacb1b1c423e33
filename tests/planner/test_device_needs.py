"""The smallest cluster of each kind: as the full search says, no layout faster than its best, and priced."""

import pytest

from harness.today import some_of
from shardwise.cluster.catalog import accelerators
from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.layout.usual_workload import LONGEST, usual_workload
from shardwise.model.catalog import catalog, get
from shardwise.model.lora import Lora
from shardwise.model.parameters import count
from shardwise.planner import plan
from shardwise.planner.device_needs import NODE, cluster_of_size, models_that_fit, serving_needs, training_needs
from shardwise.planner.runnable import space_for
from shardwise.planner.serving import plan_serving
from shardwise.planner.shortfall import fits
from shardwise.predict.memory.capacity import room_of

WORK = Workload(seq=2048, batch=64)
KINDS = ("RTX-4090", "H100-80GB-SXM", "L40S", "B300")


@pytest.mark.parametrize("name", some_of(["llama-3.2-1b", "llama-3-8b", "qwen2.5-7b", "gemma-2-9b"], 1, "needs"))
def test_the_smallest_cluster_is_the_full_search_s(name):
    model = get(name)
    needs = training_needs(model, WORK, kinds=KINDS)
    assert {need.cluster.device.name for need in needs} == set(KINDS)
    for need in some_of(needs, 2, "kinds"):
        one = plan(model, need.cluster, WORK, top=1, explain=False)
        assert one.winner.seconds <= need.seconds * (1 + 1e-9)
        assert need.nbytes <= room_of(need.cluster).safe
        kind = accelerators().devices[need.cluster.device.name]
        if need.cluster.devices > 1:
            smaller = cluster_of_size(kind, need.cluster.devices // 2)
            assert fits(space_for(model, smaller, WORK, None, {})[0], room_of(smaller).safe) is None


def test_adapters_need_fewer_and_state_of_an_optimizer_counts():
    model, devices = get("llama-3-8b"), {}
    for what, trained in (("all", model), ("lora", model.replace(lora=Lora.parse("rank=16")))):
        needs = training_needs(trained, WORK, kinds=KINDS)
        devices[what] = {need.cluster.device.name: need.cluster.devices for need in needs}
    assert devices["lora"]["RTX-4090"] == 1 < devices["all"]["RTX-4090"]
    assert all(devices["lora"][kind] <= number for kind, number in devices["all"].items())


def test_cheapest_tokens_come_first_and_kinds_without_a_price_last():
    needs = training_needs(get("llama-3.2-1b"), WORK, kinds=KINDS)
    usd = [need.usd_per_million_tokens for need in needs]
    known = [each for each in usd if each is not None]
    assert usd == sorted(known) + [None] * (len(usd) - len(known)) and 0 < len(known) < len(usd)
    given = training_needs(get("llama-3.2-1b"), WORK, price=2.0, kinds=KINDS)
    assert all(need.usd_per_hour == 2.0 * need.cluster.devices for need in given)


def test_kinds_without_a_network_end_at_a_node():
    needs = training_needs(get("llama-2-70b"), WORK, kinds=("RTX-4090", "H100-80GB-SXM"))
    assert [need.cluster.device.name for need in needs] == ["H100-80GB-SXM"] and needs[0].cluster.devices > NODE


def test_serving_needs_are_a_plan_s():
    model, work = get("llama-3-8b"), Workload(prompt=512, output=128, concurrency=16)
    (need,) = serving_needs(model, work, kinds=("L40S",))
    best = plan_serving(model, need.cluster, work, top=1).winner
    assert (need.layout, need.tokens_per_second, need.seconds) == (best.layout, best.tokens_per_second, best.token)
    assert need.weights and need.cluster.devices == 1


def test_what_fits_no_cluster_is_one_line():
    with pytest.raises(UserError, match=r"fits no cluster .* take a smaller --seq"):
        training_needs(get("llama-3-8b"), Workload(seq=1 << 29, batch=1))


@pytest.mark.parametrize("name", some_of(catalog(), 12, "usual workloads"))
def test_usual_workloads_suit_the_model(name):
    model = get(name)
    usual = usual_workload(model, None, None, 3)
    assert usual.seq == min(model.max_positions, LONGEST) and len(usual.notes) == 2
    assert usual.batch % 3 == 0 and (usual.batch // 3).bit_count() == 1
    assert 2**18 < usual.batch * usual.seq <= 2**22
    assert usual_workload(model, 512, 7).notes == ()


def test_models_that_fit_are_within_the_memory_and_more_of_it_fits_more():
    rows = {memory: {one.name: one for one in models_that_fit(memory * 10**9)} for memory in (4, 24)}
    for memory, fitting in rows.items():
        for one in fitting.values():
            assert one.parameters == count(get(one.name))
            assert 0 < min(one.held.values()) <= max(one.held.values()) <= (memory - 2) * 1e9
    assert rows[4].keys() < rows[24].keys()
    eight = rows[24]["llama-3-8b"].held
    assert set(eight) == {"bfloat16", "int8", "int4", "lora"} and eight["int4"] < eight["int8"] < eight["bfloat16"]
    with pytest.raises(UserError, match="no model of the catalog"):
        models_that_fit(2_000_001_000)
