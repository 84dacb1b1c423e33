"""A measured device: what its samples say is what its constants predict, through the cluster file and back."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from harness.cases import from_table
from harness.measured_cpu import AXIS, LENGTHS, MODEL, RATES, SIZES, TURNS, attended, cluster, device, samples, took
from shardwise.cluster import Cluster, Device, Link
from shardwise.cluster.writing import to_toml
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import get
from shardwise.model.parameters import blueprint
from shardwise.planner import plan
from shardwise.planner.serving import plan_serving
from shardwise.planner.strategies import Asked, compare
from shardwise.predict import estimate
from shardwise.predict.step_seconds import step_seconds
from shardwise.predict.time import Kernels, Pricing, StepShape, constants, engine, training_step
from shardwise.predict.time.block import Shape, tally_part
from shardwise.predict.time.measuring import COUNTED, device_of, family_of, filled
from shardwise.predict.time.network import Collectives
from shardwise.predict.time.traffic import held_parameters, traffic


@pytest.fixture
def read_back(tmp_path):
    file = tmp_path / "here.toml"
    file.write_text(to_toml(cluster()), encoding="utf-8")
    return Cluster.parse(str(file))


def test_the_file_keeps_all_that_was_measured(read_back):
    assert read_back == cluster()
    assert read_back.device.measured["values"]["stream_norm_float32"] > 0
    assert constants(read_back.device).sources["stream_norm_float32"] == "a test"


def test_measured_products_are_predicted(read_back):
    kernels = Kernels(constants(read_back.device))
    for dtype, shape, turn in product(RATES, product(AXIS, AXIS, AXIS), TURNS):
        expected = took(dtype, *shape) * TURNS[turn]
        assert float(kernels.matmul(*shape, dtype, turned=turn)) == pytest.approx(expected, rel=0.03), (shape, turn)
    # Between the shapes of the grid, too.
    assert float(kernels.matmul(512, 700, 1000, "float32")) == pytest.approx(took("float32", 512, 700, 1000), rel=0.1)
    # Fewer rows than it has take no longer than the fewest.
    few = [float(kernels.matmul(rows, 1024, 1024, "float32")) for rows in (1, min(AXIS) / 2, min(AXIS))]
    assert few == sorted(few) and few[0] < few[-1]


def test_a_measured_cpu_serves_with_this_projects_own_engine(read_back):
    planned = plan_serving(MODEL, read_back, Workload(prompt=100, output=20, concurrency=2))
    compared = compare(MODEL, [Layout.parse("tp=2")], read_back, Asked(100, 20))
    assert planned.engine == compared.engine == "shardwise-cpu"


def test_measured_attention_is_predicted(read_back):
    kernels = Kernels(constants(read_back.device))
    for dtype, width, length in product(RATES, (64, 128), LENGTHS):
        seconds = float(kernels.attention(1, length, length, 8, 8, width, dtype=dtype))
        assert seconds == pytest.approx(attended(dtype, width, length), rel=0.002)
        ratio = float(kernels.attention_ratio(width, length, dtype))
        assert ratio == pytest.approx(1.0 + LENGTHS.index(length), rel=0.001)
    # Between the lengths what lies between; beyond them what the last one says.
    assert 1.0 < float(kernels.attention_ratio(64, 256, "float32")) < 2.0
    assert float(kernels.attention_ratio(64, 8192, "float32")) == pytest.approx(3.0, rel=0.001)


def test_a_file_without_lengths_is_read_as_before():
    found = device()
    bare = {key: value for key, value in found.measured["attention"]["float32"]["64"].items() if key != "residual"}
    del bare["lengths"]
    attention = {dtype: {"64": bare | {"backward": 0.8}} for dtype in RATES}
    kernels = Kernels(constants(replace(found, measured={**found.measured, "attention": attention})))
    assert kernels.attention_ratio(64, 512, "float32") == pytest.approx(2.0)
    assert float(kernels.attention(1, 512, 512, 8, 8, 64, dtype="float32")) > 0


@pytest.mark.parametrize("dtype", RATES)
def test_passes_are_counted_as_the_block_counts_them(dtype):
    """With one operation slow and the others free, a block takes as long as its share of the samples."""
    rows, width = 64, {"float32": 4.0, "bfloat16": 2.0}[dtype]
    shape = Shape(1, rows, 1, rows, rows, dtype=dtype)
    elements = {"norm": 2 * rows * MODEL.hidden, "activation": rows * MODEL.ffn, "rotation": rows * 2 * MODEL.hidden}
    elements["loss"] = rows * MODEL.vocab
    known = constants(device())
    free = {name: 1e12 for name in known.values if name.startswith("stream")}
    for of, count in elements.items():
        slow = known.with_values(**{**free, f"stream_{of}_{dtype}": 1.0}, pass_s=0.0)
        part = blueprint(MODEL).parts[-1 if of == "loss" else 1]
        tally = tally_part(part, MODEL, shape, engine("shardwise-cpu"), Kernels(slow))
        seconds = tally.forward["memory"] + tally.backward["memory"]
        assert float(seconds) == pytest.approx(COUNTED[of] * count * width / known.bandwidth, rel=1e-6), of


def test_measured_collectives_are_predicted():
    found = Pricing(cluster()).collectives
    for op, nbytes in product(("all_reduce", "all_gather_into", "reduce_scatter"), SIZES):
        assert float(found.seconds(op, nbytes, 2)) == pytest.approx(1e-5 + nbytes * 1e-9, rel=0.02)
    assert float(found.hop(1 << 22, 1)) == pytest.approx(1e-5 + (1 << 22) * 1e-9, rel=1e-3)
    assert float(found.hop(1 << 23, 1)) == pytest.approx(2 * float(found.hop(1 << 22, 1)))


@pytest.mark.parametrize("text", ["dp=2,precision=fp32", "tp=2,sp,precision=fp32", "pp=2,precision=fp32", "dp=2"])
def test_estimate_has_a_time(text):
    workload = Workload(seq=128, batch=8)
    report = estimate(MODEL, Layout.parse(text), workload, cluster())
    assert report.timing and report.time == pytest.approx(sum(report.timing["parts"].values()))
    assert report.timing["low"] < report.time < report.timing["high"] and report.timing["engine"] == "shardwise-cpu"
    twice = estimate(MODEL, Layout.parse(text), workload, cluster(samples(speed=2.0)))
    assert twice.time == pytest.approx(report.time / 2, rel=0.1)


def test_fp32_takes_longer_than_bf16():
    fast, slow = (
        step_seconds(MODEL, Layout.parse(f"dp=2,precision={p}"), Workload(128, 2), cluster()) for p in ("bf16", "fp32")
    )
    assert slow.parts["matmul"] > 3 * fast.parts["matmul"] and slow.parts["data"] > fast.parts["data"]


def seconds(text: str, told=None, batch: int = 8, name: str | None = None):
    layout = Layout.parse(f"{text},precision=fp32")
    return step_seconds(MODEL, layout, Workload(128, batch), cluster(told), name)


@pytest.mark.parametrize(
    ("text", "meeting"),
    [("dp=2", 1), ("dp=2,zero=1", 1), ("dp=2,zero=2", 2), ("dp=2,zero=3", 2), ("tp=2", 2), ("tp=2,sp", 2), ("cp=2", 2)],
)
def test_who_meets_in_every_block_loses_what_others_take_of_each(text, meeting):
    free, shared = seconds(text), seconds(text, samples(taken=0.05))
    assert free.parts["host"] == 0.0
    computing = sum(free.parts[part] for part in ("matmul", "attention", "memory", "tensor"))
    # What stage 3 gathers block by block is held up with its block.
    most = computing + free.parts["data"]
    assert 0.05 * meeting * computing <= shared.parts["host"] * 1.0001 <= 0.05 * meeting * most * 1.0002
    rest = {part: value for part, value in shared.parts.items() if part != "host"}
    assert rest == {part: value for part, value in free.parts.items() if part != "host"}


def test_more_ranks_than_cores_wait_for_each_other_alike():
    told = samples(ranks=4, taken=1.25)
    told["about"] |= {"ranks": 4, "cores": 2}
    values = device(told).measured["values"]
    assert (values["shared"], values["taken"]) == (1.0, 0.25)
    told["about"]["cores"] = 8
    assert device(told).measured["values"]["shared"] == 0.0


def test_the_network_between_nodes_needs_no_core():
    """Twice as slow, it takes longer, and the host waits for cores as long as before."""
    told = device(samples(ranks=4, taken=0.5))
    slow, slower = (
        step_seconds(MODEL, Layout.parse("dp=4,zero=3"), Workload(128, 4), on)
        for on in (Cluster(2, 2, told, Link(1e-6, 1e9), Link(1e-6, rate), nics=1) for rate in (2e7, 1e7))
    )
    assert slower.parts["data"] == pytest.approx(2 * slow.parts["data"], rel=0.1)
    assert slower.parts["host"] == pytest.approx(slow.parts["host"]) and slow.parts["host"] > 0


def test_every_gather_of_packed_weights_is_packed():
    """Without second copies the later gathers of a step go over all ranks, packed as the first one."""
    known = Pricing(cluster(ranks=4))
    split = StepShape(128, micro_batches=2, dp=4, shard=4, zero=3, dtype="float32", qwz=True)
    sent = traffic(MODEL, split, engine("shardwise-cpu"), known)
    assert sent.unit_again == sent.unit_gather and sent.table_again == sent.table_gather
    near = traffic(MODEL, replace(split, hpz=2), engine("shardwise-cpu"), known)
    plain = traffic(MODEL, replace(split, hpz=2, qwz=False), engine("shardwise-cpu"), known)
    assert near.unit_again == plain.unit_again


def test_stage_3_finds_the_last_block_where_it_was():
    known, split = Pricing(cluster(ranks=4)), StepShape(128, dp=4, shard=4, zero=3, dtype="float32")
    each = replace(engine("shardwise-cpu"), keeps_last=False)
    sent = traffic(MODEL, split, each, known)
    less = [float(training_step(MODEL, split, e, known).parts["data"]) for e in (each, engine("shardwise-cpu"))]
    assert less[0] - less[1] == pytest.approx(float(sent.unit_gather), rel=1e-6)


def test_sequences_are_copied_where_a_micro_batch_has_several():
    still = replace(engine("shardwise-cpu"), sequence_copies=False)
    known = Pricing(cluster())

    def copying(micro, **kind):
        split = StepShape(128, micro=micro, micro_batches=8 // micro, tp=2, dtype="float32", **kind)
        with_copies, without = (
            training_step(MODEL, split, profile, known).parts["memory"] for profile in (engine("shardwise-cpu"), still)
        )
        return float(with_copies - without)

    assert copying(1, sp=True) == copying(4) == 0.0
    tensor = 4.0 * 128 * MODEL.hidden * 2
    each = float(known.kernels.pass_over(2 * tensor, dtype="float32"))
    # Ten of a block, two of the embedding and three of the head, in each of four micro-batches.
    assert copying(2, sp=True) == pytest.approx(4 * (10 * MODEL.layers + 5) * each, rel=1e-6)


def test_the_vocabulary_ends_have_their_collectives():
    """Sums of the embedding's rows and of the head's gradient, beside four of every block; and two of the loss."""
    model, known, none = replace(MODEL, layers=1), Pricing(cluster()), engine("shardwise-cpu")

    def tensor(model, sp):
        split = StepShape(128, micro=2, tp=2, sp=sp, dtype="float32")
        return float(training_step(model, split, none, known).parts["tensor"])

    price, full, tokens = known.collectives.seconds, 4.0 * 256 * MODEL.hidden, 256
    loss = float(sum(price("all_reduce", 4.0 * n * tokens, 2) for n in (1, 2)))
    gather, scatter = (float(price(op, full, 2)) for op in ("all_gather_into", "reduce_scatter"))
    assert tensor(model, False) == pytest.approx(6 * float(price("all_reduce", full, 2)) + loss, rel=1e-9)
    # One more gather of the head's input in backward, as in a block, where there are two of them. Each rank has the
    # gradients of norms for its own tokens.
    (block,) = blueprint(model).of_kind("block")
    norms = float(price("all_reduce", 4.0 * sum(p.numel for p in block.parameters if p.cut == "replicated"), 2))
    assert tensor(model, True) == pytest.approx((6 + 3) * gather + (4 + 2) * scatter + loss + norms, rel=1e-9)


def test_gradients_are_added_to_those_of_earlier_micro_batches():
    # fp32, on the host's cores: nothing is converted, and the first micro-batch overwrites.
    added = {
        zero: [
            seconds(f"dp=2,zero={zero},micro={micro}", name="shardwise-cpu").parts["gradients"] for micro in (4, 2, 1)
        ]
        for zero in (2, 3)
    }
    for few, more, most in added.values():
        assert few == 0.0 and most == pytest.approx(3 * more, rel=0.05)
    profile, known = engine("shardwise-cpu"), Pricing(cluster())
    split = StepShape(128, micro_batches=4, dp=2, shard=2, zero=2, dtype="float32")
    shard = sum(float(each) for each in held_parameters(MODEL, split, profile)) / 2
    least = 3 * float(known.kernels.pass_over(12.0 * shard, dtype="float32"))
    priced = float(training_step(MODEL, split, profile, known).parts["gradients"])
    assert (
        least * 0.99 <= priced <= least + 4 * (MODEL.layers + 2) * float(known.kernels.pass_over(0.0, dtype="float32"))
    )
    assert seconds("dp=2,zero=1", name="shardwise-cpu").parts["gradients"] == 0.0, "added by the products"


def test_stage_3_waits_for_tables_where_nothing_is_hidden():
    one, wide = (
        step_seconds(replace(MODEL, vocab=v), Layout.parse("dp=2,zero=3,precision=fp32"), Workload(128, 8), cluster())
        for v in (512, 4096)
    )
    assert wide.parts["data"] > 1.2 * one.parts["data"]


def test_one_rank_needs_no_link():
    alone = Cluster(1, 1, device(samples(ranks=1)), Link(None, None), Link(None, None))
    assert step_seconds(MODEL, Layout(precision="fp32"), Workload(128, 8), alone).seconds > 0


@from_table
def test_a_damaged_table_is_told_in_one_line(change, words):
    found = device()
    with pytest.raises(UserError, match=words):
        constants(replace(found, measured={**found.measured, **change}))


def test_a_grid_of_the_wrong_size_is_told():
    found = device()
    grid = {dtype: {**form, "axes": [[1, 2]] * 3} for dtype, form in found.measured["matmul"].items()}
    with pytest.raises(UserError, match="axes of three lengths"):
        Kernels(constants(replace(found, measured={**found.measured, "matmul": grid})))


def test_what_was_not_measured_is_said():
    with pytest.raises(UserError, match="gemv_int4 is not known"):
        constants(device()).value("gemv_int4")


def test_gaps_take_their_neighbours():
    table = np.full((2, 2, 2), np.nan)
    table[0, 0, 0], table[1, 1, 1] = 1.0, 3.0
    full = filled(table)
    assert full[0, 0, 1] == 1.0 and full[0, 1, 1] == 3.0 and not np.isnan(full).any()


def test_families():
    assert [family_of([major, 0]) for major in (7, 8, 9, 10, 12)] == ["Ampere", "Ampere", "Hopper", *["Blackwell"] * 2]


@pytest.mark.parametrize("name", ["shardwise-cpu", "shardwise"])
def test_the_planner_finds_the_same_times(name):
    found = plan(MODEL, cluster(ranks=4), Workload(128, 8), engine=name, top=40, reserve=0.0, explain=False)
    for one in found.ranked:
        alone = step_seconds(MODEL, one.layout, Workload(128, 8), cluster(ranks=4), name)
        assert one.seconds == pytest.approx(alone.seconds, rel=1e-9), str(one.layout)


def test_stage_3_under_a_pipeline_gathers_once_where_the_engine_does():
    known = Pricing(cluster(ranks=4))
    each = replace(engine("shardwise-cpu"), gathers_by_stage=False)

    def data(profile, pp, count):
        split = StepShape(128, micro_batches=count, pp=pp, dp=4 // pp, shard=4 // pp, zero=3, dtype="float32")
        return float(training_step(MODEL, split, profile, known).parts["data"])

    assert data(engine("shardwise-cpu"), 2, 8) < 0.7 * data(each, 2, 8)
    assert data(engine("shardwise-cpu"), 1, 8) == data(each, 1, 8)


def test_a_ring_that_outlasts_its_attention_is_waited_for():
    model, split = get("llama-3-8b"), StepShape(8192, cp=8)

    def waiting(bandwidth):
        slow = Cluster(1, 8, Cluster.parse("8xH100").device, Link(1e-6, bandwidth), Link(None, None))
        return float(training_step(model, split, engine("megatron-bridge"), Pricing(slow)).parts["tensor"])

    # Of slow messages next to all is waited for: on links half as fast, twice as long.
    assert waiting(1e8) == pytest.approx(2 * waiting(2e8), rel=0.05)
    assert waiting(1e12) < 0.01 * waiting(1e9)


def test_a_gpu_keeps_the_tiles_of_its_family():
    told = samples(ranks=1) | {"about": {"torch": "0", "sms": 132, "capability": [9, 0]}}
    told["samples"].append({"what": "sustained", "of": ["bfloat16"], "shape": [1000] * 3, "seconds": 2e9 / 7e11})
    known = constants(device_of(told, "Test GPU", "cuda", 80 * 10**9, MODEL, "a test"))
    assert known.family == "Hopper" and known.sms == 132 and len(known.form("bfloat16")["tiles"]) > 1
    # What the host takes for an operation is waited for beside the device, not part of each kernel.
    assert known.value("launch_s") > 0 and "pass_s" not in known.values
    for dtype, shape in product(RATES, ((256, 2048, 256), (2048, 2048, 2048))):
        seconds = float(Kernels(known).matmul(*shape, dtype, turned="forward")) * known.value("sustained")
        assert seconds == pytest.approx(took(dtype, *shape), rel=0.03)
    # Products in a row are bound by the power limit.
    assert known.ceiling("bfloat16") == 7e11 and known.ceiling("float32") == known.peak("float32")
    # The loss is counted as one kernel for CUDA passes over the logits.
    assert known.value("stream_loss_bfloat16") == pytest.approx(
        0.75 * constants(device()).value("stream_loss_bfloat16"), rel=1e-3
    )
    # Links between GPUs are the cluster's, with what NCCL takes over their price on the family.
    assert known.collectives and not known.timed


def two_nodes(nics: int) -> Cluster:
    """Two nodes with 12.5 MB/s between them for each NIC, and all else free."""
    free = Device("here", "cpu", 8 << 30, 1e15, {"float32": 1e10, "bfloat16": 1e10})
    return Cluster(2, 2, free, Link(0.0, 1e15), Link(0.0, 12.5e6), nics=nics)


@pytest.mark.parametrize(("op", "leaving"), [("all_gather_into", 0.75), ("reduce_scatter", 1.0), ("all_to_all", 1.0)])
def test_gloo_sends_between_nodes_what_its_schedules_send(op, leaving):
    """Bytes that leave a node of two over its NIC, as multiples of the tensor: one of four edges of a ring that passes
    three quarters, and messages of a quarter between all pairs. Cheaper schedules, which gloo lacks, do not count."""
    priced = Collectives(two_nodes(1), constants(device())).seconds(op, 12.5e6, 4)
    assert float(priced) == pytest.approx(leaving, rel=1e-3)
    one_each = Collectives(two_nodes(0), constants(device())).seconds(op, 12.5e6, 4)
    assert float(one_each) <= float(priced)


def test_ranks_of_a_node_share_its_nics():
    shared, alone = two_nodes(1), two_nodes(0)
    assert (shared.network_share, alone.network_share, two_nodes(3).network_share) == (0.5, 1.0, 1.0)
    hops = [float(Collectives(on, constants(device())).hop(12.5e6, 2)) for on in (shared, alone)]
    assert hops == pytest.approx([2.0, 1.0], rel=1e-6)


def test_what_was_measured_on_one_host_counts_inside_each_of_several():
    told = device()
    near = Cluster(1, 2, told, Link(1e-6, 1e9), Link(None, None))
    far = replace(near, nodes=2, inter=Link(1e-3, 1e6))
    prices = [Collectives(on, constants(told)).seconds("all_gather_into", 1e6, 2) for on in (near, far)]
    assert prices[0] == prices[1]
