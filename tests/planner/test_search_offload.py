from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import from_table
from harness.frames import frame_of
from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, check_runnable
from shardwise.layout.optimizers import OPTIMIZERS
from shardwise.model.catalog import get
from shardwise.model.lora import Lora
from shardwise.planner import Space, plan, price_one
from shardwise.planner.bounds import MemoryBound
from shardwise.planner.exact import ExactMemory
from shardwise.planner.pricing import Prices
from shardwise.planner.space import Homes
from shardwise.predict import estimate
from shardwise.predict.fixing import fixed_of, text_of
from shardwise.predict.node_bytes import NodeBytes, node_bytes
from shardwise.predict.time import Pricing, engine

HOMES = st.sampled_from(["offload=cpu", "offload=cpu:0.5", "offload=cpu:0.01", "offload=nvme", "offload=nvme:0.9",
                         "zero=3,offload=cpu,offload_params=cpu", "zero=3,offload=nvme:0.5,offload_params=cpu",
                         "zero=3,offload=nvme,offload_params=nvme"])  # fmt: skip
MODELS = st.sampled_from(["tiny-llama", "tiny-gpt", "gpt2", "llama-3.2-1b", "tiny-qwen3-moe"])
OWN = engine("shardwise")


@st.composite
def layouts(draw):
    homes = draw(HOMES)
    degrees = {key: draw(st.sampled_from([1, 2])) for key in ("dp", "tp", "pp")}
    text = ",".join(f"{key}={n}" for key, n in degrees.items())
    words = [text, homes, f"recompute={draw(st.sampled_from(['none', 'selective', 'full']))}"]
    if "zero" not in homes:
        words.append(f"zero={draw(st.integers(0, 3))}")
    return Layout.parse(",".join([*words, f"micro={draw(st.sampled_from([1, 2]))}"]))


@settings(max_examples=80, deadline=None)
@given(MODELS, layouts(), st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from(list(OPTIMIZERS)))
def test_the_bound_is_never_above_the_bytes(name, layout, count, on_gpu, optimizer):
    model = get(name)
    workload = Workload(64, layout.dp * layout.micro * count, optimizer=optimizer)
    cluster = Cluster.parse("8xH100" if on_gpu else "8xcpu")
    exact = ExactMemory(model, workload, cluster)
    try:
        frame = frame_of(model, layout, workload)
        held = exact.of(layout).bytes.total
    except UserError:
        return
    bound = MemoryBound(model, workload, "sdpa", exact.backend).total(frame)
    assert float(bound.max()) <= held <= exact.total(layout)


def test_every_candidate_is_legal_has_the_homes_and_its_own_price():
    model, workload, cluster = get("llama-3.2-1b"), Workload(512, 8), Cluster.parse("4xH100")
    fixed = fixed_of("offload=cpu:0.5,offload_params=cpu")
    space, pricing = Space(model, cluster, workload, OWN, fixed), Pricing(cluster)
    prices = Prices(model, workload, space.attention, pricing, space.frames)
    assert space.size and all(frame.homes == Homes("cpu:0.5", "cpu") for frame in space.frames)
    for frame in space.frames[::3]:
        seconds = prices.seconds(frame, OWN)
        for i, row in enumerate(frame.rows[::5]):
            for j, sharding in enumerate(frame.shardings):
                for k, order in enumerate(frame.orders):
                    if not frame.possible[5 * i][k]:
                        continue
                    layout = frame.layout(row, sharding, order)
                    check_runnable(layout, model, workload)
                    one = price_one(model, layout, workload, OWN, pricing)
                    assert layout.zero == 3 and layout.offload == "cpu:0.5"
                    assert one.seconds == pytest.approx(float(seconds[5 * i, j, k]), rel=1e-9)


def test_one_device_has_stages_once_something_is_offloaded():
    model, workload, cluster = get("llama-3.2-1b"), Workload(512, 4), Cluster.parse("1xH100")
    plain, away = (Space(model, cluster, workload, OWN, fixed_of(text)) for text in ("", "offload=cpu"))
    stages = [{s.zero for frame in space.frames for s in frame.shardings} for space in (plain, away)]
    assert stages == [{0}, {0, 1, 2, 3}]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_plan_has_the_bytes_of_estimate_on_device_host_and_disk(optimizer):
    workload = Workload(2048, 16, optimizer=optimizer)
    found = plan("llama-3-8b", "8xH100", workload, fix=fixed_of("offload=nvme,zero=3"), top=3)
    for one in found.ranked:
        report = estimate("llama-3-8b", one.layout, workload, "8xH100")
        assert max(role.bytes.total for role in report.roles) == one.held.total
        if one.layout.pp == 1:
            (role,) = report.roles
            assert one.node == NodeBytes(8 * role.host.total, 8 * role.disk.total)
        assert report.time == pytest.approx(one.seconds)
        assert report.timing and report.timing["high"] == pytest.approx(float(one.range.high))


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_a_node_has_the_bytes_of_its_own_ranks(devices):
    model, layout, workload = get("llama-3.2-1b"), Layout.parse("dp=2,pp=4,offload=cpu"), Workload(512, 8)
    cluster = replace(Cluster.parse("8xH100"), nodes=8 // devices, devices_per_node=devices)
    report = estimate(model, layout, workload, cluster)
    of_rank = {rank: role.host.total for role in report.roles for rank in role.ranks}
    nodes = [sum(of_rank[rank] for rank in range(at, at + devices)) for at in range(0, 8, devices)]
    assert node_bytes(model, layout, workload, cluster) == NodeBytes(max(nodes), 0)


def test_a_host_that_is_too_small_holds_nothing():
    model, workload, fixed = get("llama-3-8b"), Workload(2048, 16), fixed_of("offload=cpu")
    small = Cluster.parse("8xH100").with_host_memory(16 * 10**9)
    with pytest.raises(UserError) as error:
        plan(model, small, workload, fix=fixed)
    assert "does not fit the hosts of 8xH100" in str(error.value) and "--host-memory" in str(error.value)
    assert "\n" not in str(error.value)
    large = plan(model, small.with_host_memory(10**12), workload, fix=fixed)
    assert 0 < large.winner.node.host <= 10**12
    assert plan(model, small, workload, fix=fixed_of("offload=nvme")).winner.node.disk > 0


def test_adapters_that_do_not_fit_are_told_what_they_can_have() -> None:
    model = get("llama-3-405b").replace(lora=Lora(16))
    with pytest.raises(UserError, match=r"does not fit 8xH100.*base=nf4.* or take 2x8xH100") as error:
        plan(model, "8xH100", Workload(4096, 64))
    assert "offload" not in str(error.value)  # parameters off the device are not priced beside adapters
    assert plan(model.replace(lora=Lora(16, base="nf4")), "8xH100", Workload(4096, 64), explain=False).ranked


def test_the_ranks_of_a_cpu_have_one_memory_for_both():
    model, workload, layout = get("llama-3.2-1b"), Workload(128, 4), Layout.parse("dp=2,zero=1,offload=cpu")
    exact = ExactMemory(model, workload, Cluster.parse("2xcpu"))
    assert exact.total(layout) == exact.of(layout).bytes.total + exact.node(layout).host // 2


@from_table
def test_where_nothing_fits_offloading_is_among_what_would_do(model, cluster, host, words):
    where = Cluster.parse(cluster)
    where = where.with_host_memory(int(float(host))) if host else where
    with pytest.raises(UserError) as error:
        plan(model, where, Workload(2048, 8))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_an_engine_whose_offloading_is_not_modelled_says_so():
    with pytest.raises(UserError, match="megatron-bridge cannot run offload=cpu: no offloading is modelled"):
        plan("llama-3-8b", "8xH100", Workload(2048, 8), engine="megatron-bridge", fix=fixed_of("offload=cpu"))


@from_table
def test_homes_that_cannot_be_fixed_are_one_line(text, words):
    with pytest.raises(UserError, match=words):
        fixed_of(text)


def test_the_searched_keys_of_a_layout_have_its_homes():
    layout = Layout.parse("dp=2,zero=3,offload=cpu:0.5,offload_params=cpu")
    assert fixed_of(text_of(layout)) | {} == fixed_of(text_of(layout))
    assert "offload=cpu:0.5,offload_params=cpu" in text_of(layout) and "offload" not in text_of(Layout(dp=2))
