"""The price of a step follows the plan: widths of gradients, passes that add them up, gathers of a pipeline; and what
a search makes of it."""

from dataclasses import replace

import pytest

from harness.space import cases
from harness.today import some_of
from shardwise.cluster import Cluster
from shardwise.layout import Layout, Workload
from shardwise.layout.units import unit_plan
from shardwise.model.catalog import get
from shardwise.planner.plan import plan
from shardwise.predict.estimate import estimate
from shardwise.predict.time import Pricing, StepShape, engine
from shardwise.predict.time.kernels import Kernels
from shardwise.predict.time.step import training_step
from shardwise.predict.time.traffic import traffic
from shardwise.report.step_report import DTYPE_BYTES
from shardwise.schedule.pipeline.completion import gathers_of_a_stage

LLAMA = get("llama-3-8b")


@pytest.mark.parametrize("point", some_of([p for p in cases("dense") if p.case.precision != "fp64"], 12, "widths"))
def test_widths_are_those_of_the_plan(point):
    plan_of = unit_plan(point.case.model, point.layout, point.case.workload, backend="nccl")
    split = StepShape.of(point.layout, point.case.workload)
    assert float(split.gradient_width) == DTYPE_BYTES[plan_of.grad_dtype]
    assert float(split.wire_width) == DTYPE_BYTES[plan_of.wire_dtype]


def test_gradients_of_several_micro_batches_go_over_the_wire_in_fp32():
    # llama-3.2-1b, dp=8,zero=1: 4.94 GB a step with 8 micro-batches, half with one; priced alike before.
    one, many = (
        traffic(get("llama-3.2-1b"), StepShape(2048, dp=8, zero=1, shard=8, micro_batches=m), engine("shardwise"),
                Pricing(Cluster.parse("8xH100")))
        for m in (1, 8)
    )  # fmt: skip
    assert float(many.reduce) == pytest.approx(2 * float(one.reduce), rel=0.05)
    # From stage 2 on each micro-batch's are reduced in 16 bits.
    late = traffic(LLAMA, StepShape(2048, dp=8, zero=2, shard=8, micro_batches=8), engine("shardwise"),
                   Pricing(Cluster.parse("8xH100")))  # fmt: skip
    early = traffic(LLAMA, StepShape(2048, dp=8, zero=1, shard=8, micro_batches=1), engine("shardwise"),
                    Pricing(Cluster.parse("8xH100")))  # fmt: skip
    assert float(late.reduce) == pytest.approx(float(early.reduce))


@pytest.mark.parametrize(("grads", "count", "moved"), [("bf16", 1, 0), ("fp32", 1, 6), ("bf16", 8, 6 + 7 * 10)])
def test_adding_up_gradients_has_a_price_below_stage_2(grads, count, moved):
    layout, cluster = Layout.parse(f"dp=8,zero=1,grads={grads}"), Cluster.parse("8xH100")
    report = estimate(LLAMA, layout, Workload(seq=512, batch=8 * count), cluster)
    seconds = report.timing["parts"]["gradients"]
    least = moved * 8.03e9 / cluster.device.memory_bandwidth
    assert least * 0.99 <= seconds <= least * 1.3 + 1e-9
    cheaper = training_step(LLAMA, StepShape(512, dp=8, zero=1, shard=8, micro_batches=count), engine("shardwise"),
                            Pricing(cluster))  # fmt: skip
    assert (float(cheaper.parts["gradients"]) > 0) == (count > 1)


def test_a_product_that_adds_takes_as_long_as_its_accumulator_is_moved():
    pricing = Pricing(Cluster.parse("1xH100"))
    kernels: Kernels = pricing.kernels
    plain, adding = (float(kernels.matmul(28672, 8192, 512, "bfloat16", 1.0, "weight", out)) for out in (0.0, 8.0))
    assert adding >= 8 * 28672 * 8192 / pricing.constants.bandwidth > plain
    deep = [float(kernels.matmul(28672, 8192, 65536, "bfloat16", 1.0, "weight", out)) for out in (0.0, 8.0)]
    assert deep[0] == pytest.approx(deep[1]), "where the product itself takes longer, nothing changes"


@pytest.mark.parametrize("virtual", [1, 2, 3, 4, 5, 6, 10])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_are_gathered_as_often_as_the_schedule_does(pp, virtual):
    model = get("llama-3-8b").replace(layers=pp * virtual)
    schedule = f"schedule=interleaved,virtual={virtual}" if virtual > 1 else "schedule=1f1b"
    for rounds in (1, 2, 3, 5):
        layout = Layout.parse(f"dp=2,pp={pp},zero=3,{schedule}")
        first = unit_plan(model, layout, Workload(seq=64, batch=2 * pp * rounds), backend="nccl")
        counts = []
        for rank in range(pp):
            mine = replace(first, pp_rank=rank)
            blocks = set(mine.of_kind("block"))
            gathers = sum(n for (_, gather), n in mine.gather_counts().items() if gather.unit in blocks)
            counts.append(gathers / len(blocks))
        assert max(counts) == pytest.approx(float(gathers_of_a_stage(virtual, rounds)))


def test_a_ring_over_nodes_takes_as_long_as_its_longest_message():
    def inside(cp: int) -> float:
        split = StepShape(32768, cp=cp, micro_batches=1)
        return float(
            training_step(LLAMA, split, engine("shardwise"), Pricing(Cluster.parse("2x8xH100"))).parts["tensor"]
        )

    assert inside(16) > 4 * inside(8), "one message in eight crosses the network, and all wait for it"


def test_among_layouts_as_fast_the_most_common_comes_first():
    found = plan("llama-3-70b", "8x8xH100", seq=8192, batch=1024, top=3, explain=False)
    raw = plan("llama-3-70b", "8x8xH100", seq=8192, batch=1024, top=3, explain=False, by="fastest")
    assert found.fastest is not None and found.fastest.layout == raw.winner.layout
    assert raw.winner.seconds <= found.winner.seconds <= raw.winner.seconds * 1.05
    assert found.winner.layout.tp <= 8 and found.winner.layout.cp <= 2 and found.winner.layout.virtual <= 5
    assert raw.fastest is None and "as fast within the error" in found.conclusion()
    data = found.to_json()
    assert data["fastest"]["layout"] == str(raw.winner.layout)
    assert {row["layout"] for row in data["as_fast"]} >= {str(one.layout) for one in found.ranked}


@pytest.mark.parametrize("devices", some_of([128, 2048], 1, "405B"))
def test_405b_does_not_cut_short_sequences(devices):
    found = plan("llama-3-405b", f"{devices}x8xH100", seq=8192, batch=max(512, devices), top=1, explain=False)
    assert found.winner.layout.cp <= 2 and found.winner.layout.tp <= 8


def test_the_best_layout_keeps_a_margin_of_memory():
    found = plan("llama-3-8b", "8xH100", seq=8192, batch=64, top=5, explain=False)
    assert all(one.held.total <= found.room.safe for one in found.ranked)
    assert found.to_json()["ranked"][0]["memory"] == "fits"
    least = min(plan("llama-3-8b", "8xH100", seq=8192, batch=64, top=1, explain=False, by="memory").ranked,
                key=lambda one: one.held.total).held.total  # fmt: skip
    tight = replace(
        Cluster.parse("8xH100"), device=replace(Cluster.parse("8xH100").device, memory_bytes=least * 1.01 + 2e9)
    )
    risky = plan("llama-3-8b", tight, seq=8192, batch=64, top=1, explain=False)
    assert risky.to_json()["ranked"][0]["memory"] == "at risk" and "at risk" in risky.conclusion()
    assert any("margin" in warning for warning in risky.warnings)
    sure = plan("llama-3-8b", tight, seq=8192, batch=64, top=1, explain=False, reserved=2e9)
    assert sure.room.margin == 0.0 and sure.to_json()["ranked"][0]["memory"] == "fits"


def test_an_estimate_says_that_a_peak_is_at_risk():
    report = estimate(LLAMA, "dp=8,zero=2", cluster="8xH100", seq=8192, batch=64)
    room = report.room
    assert room["state"] == "fits" and room["safe"] < room["usable"]
    assert estimate(LLAMA, "dp=8", cluster="8xH100", seq=8192, batch=64).room["state"] == "does not fit"
