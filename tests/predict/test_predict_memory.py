"""Closed forms of memory, against the figures that the literature gives."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given

from harness.space import cases
from harness.strategies import split_models
from harness.today import EVERYTHING, seed
from shardwise.cluster import Cluster
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, gathers, pipeline, unit_plan
from shardwise.layout.gathers import gather_counts
from shardwise.layout.step import count_step
from shardwise.layout.transport_buffers import transport_buffers
from shardwise.layout.unit import Backend
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.parameters import count
from shardwise.predict import estimate
from shardwise.predict.memory.activations import made_items, saved_bytes, saved_items
from shardwise.predict.memory.buffers import held_through_step
from shardwise.predict.memory.pipeline import _Rank, held_by_actions
from shardwise.predict.memory.pipeline_action import StageBytes
from shardwise.predict.memory.sizes import Sizes
from shardwise.predict.memory.states import zero_table
from shardwise.predict.memory.step import gradient_bytes, optimizer_bytes, parameter_bytes, predict_bytes
from shardwise.predict.traffic import ledger
from shardwise.report.step_report import DTYPE_BYTES

GB = 1e9
MODEL = ModelConfig("m", vocab=64, hidden=32, layers=3, heads=4, kv_heads=2, ffn=48, max_positions=64)


# -- training states: the published table


def test_16_bytes_a_parameter() -> None:
    """7B: 14 GB of weights, 14 of gradients, 84 of optimizer state: 112 GB."""
    assert zero_table(7e9, [1])[0][1] == 112 * GB
    plan = unit_plan(MODEL, Layout(), Workload(16, 1))
    parts = parameter_bytes(plan), gradient_bytes(plan), optimizer_bytes(plan)
    assert parts == (2 * count(MODEL), 2 * count(MODEL), 12 * count(MODEL))


@pytest.mark.parametrize(("optimizer", "less", "words"), [("momentum", 4, "one moment"), ("sgd", 8, "no moments")])
def test_4_or_8_bytes_less_without_moments(optimizer: str, less: int, words: str) -> None:
    for text, wide in (("dp=1", 4), ("dp=1,precision=fp64", 8), ("dp=2,zero=1", 4), ("dp=2,zero=3,offload=cpu", 4)):
        layout = Layout.parse(text)
        adam, mine = (estimate(MODEL, layout, Workload(16, 2, optimizer=kind)) for kind in ("adamw", optimizer))
        updated = sum(unit.shard_numel for unit in unit_plan(MODEL, layout, Workload(16, 2)).units)
        (a,), (b,) = adam.roles, mine.roles
        saved = a.bytes.optimizer + a.host.optimizer - b.bytes.optimizer - b.host.optimizer
        assert saved == less * wide // 4 * updated
        note = f"{optimizer} keeps {words} per parameter where adamw keeps two: {less * wide // 4} bytes less"
        assert note in mine.notes and note not in adam.notes


def test_18_bytes_with_fp32_gradients() -> None:
    assert zero_table(7e9, [1], gradient_bytes=4)[0][1] == 126 * GB
    plan = unit_plan(MODEL, Layout.parse("grads=fp32"), Workload(16, 1))
    assert parameter_bytes(plan) + gradient_bytes(plan) + optimizer_bytes(plan) == 18 * count(MODEL)


def test_bf16_gradients_need_one_micro_batch() -> None:
    """With more, the accumulator is fp32, and counted."""
    plan = unit_plan(MODEL, Layout(), Workload(16, 2))
    assert gradient_bytes(plan) == 4 * count(MODEL)


def test_7b_on_8_gpus() -> None:
    table = zero_table(7e9, [8])
    assert {stage: row[8] / GB for stage, row in table.items()} == pytest.approx({0: 112, 1: 38.5, 2: 26.25, 3: 14})


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_the_formulas_of_the_stages(n: int) -> None:
    p = 7e9
    table = zero_table(p, [n])
    expected = {0: 16 * p, 1: 4 * p + 12 * p / n, 2: 2 * p + 14 * p / n, 3: 16 * p / n}
    assert {stage: row[n] for stage, row in table.items()} == pytest.approx(expected)


def test_175b() -> None:
    """700 GB of weights and gradients, 2.1 TB of Adam states, 2.8 TB: at least 35 GPUs of 80 GB."""
    table = zero_table(175e9, [1, 34, 35])
    assert table[0][1] == 2800 * GB
    assert table[3][35] <= 80 * GB < table[3][34]


def test_other_published_sizes() -> None:
    assert zero_table(10e9, [1])[0][1] == 160 * GB
    assert zero_table(70e9, [1])[0][1] == pytest.approx(1.12e12)
    assert zero_table(1.5e9, [1])[0][1] == 24 * GB


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_plan_holds_what_the_table_says_up_to_padding(zero: int, n: int) -> None:
    plan = unit_plan(MODEL, Layout(dp=n, zero=zero), Workload(16, n))
    held = parameter_bytes(plan) + gradient_bytes(plan) + optimizer_bytes(plan)
    expected = zero_table(count(MODEL), [n])[zero][n]
    if zero == 3:  # gathers are rounded from the fp32 weights: no bf16 copy of the interval
        expected -= 2 * count(MODEL) / n
    assert expected <= held <= expected + 16 * n * len(plan.units)


@given(split_models())
def test_classes_add_up_and_none_is_negative(split: tuple[ModelConfig, Layout, Workload]) -> None:
    held = predict_bytes(UnitPlan(*split, 0, "gloo"))
    parts = held.to_json()
    assert all(part >= 0 for part in parts.values()) and not (held.other and held.absent)
    assert held.total == sum(parts.values()) - 2 * parts["absent"] >= held.parameters + held.optimizer + held.saved


@given(split_models())
def test_gradients_come_while_activations_go(split: tuple[ModelConfig, Layout, Workload]) -> None:
    """No accumulator is there at the first loss, all of them at the end, when nothing is on its way any more."""
    plan = UnitPlan(*split, 0, "gloo")
    moments = list(held_through_step(plan))
    assert (moments[0].when, moments[0].total) == ("loss", 0)
    assert (moments[-1].when, moments[-1].total) == ("optimizer", gradient_bytes(plan))
    assert all(b.gradients >= a.gradients for a, b in pairwise(moments))
    # One reduction runs behind one part's backward: two units are staged at once, and a tied weight.
    e = DTYPE_BYTES[plan.layout.dtype] * plan.dtypes.stages_gradients + DTYPE_BYTES[plan.dtypes.wire]
    assert max(moment.comm for moment in moments) <= 3 * e * max(unit.padded for unit in plan.units)


@given(split_models())
def test_gradients_that_others_read_lie_in_lasting_memory(split: tuple[ModelConfig, Layout, Workload]) -> None:
    """Two units' worth, and a tied weight's, whatever the moment; nothing else is staged."""
    plan = UnitPlan(*split, 0, "shared")
    if not transport_buffers(plan).lasting:
        return
    lasting = sum(transport_buffers(plan).sizes.values()) * DTYPE_BYTES[plan.layout.dtype]
    moments = list(held_through_step(plan))
    assert {moment.comm for moment in moments} == {lasting}
    assert moments[0].gradients == 0
    assert moments[-1].gradients == gradient_bytes(plan)


@given(split_models())
def test_higher_stages_hold_no_more_training_state(split: tuple[ModelConfig, Layout, Workload]) -> None:
    model, layout, workload = split
    plans = [UnitPlan(model, Layout(dp=layout.dp, tp=layout.tp, zero=z), workload, 0, "gloo") for z in range(4)]
    plans = [plan for plan in plans if workload.batch % layout.dp == 0]
    states = [optimizer_bytes(p) + parameter_bytes(p) + gradient_bytes(p) for p in plans]
    padding = 20 * layout.dp * 10
    assert all(b <= a + padding for a, b in pairwise(states))


# -- saved activations of a Llama-style block: the table of the reference


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_saved_activations_of_a_llama_block(precision: str, recompute: str) -> None:
    """none: T[e(6d + 2k + 4f) + a(h + 2)]; selective: the same without T a h; full: T e d."""
    layout = Layout.parse(f"precision={precision},recompute={recompute},micro=2")
    plan = unit_plan(MODEL, layout, Workload(16, 2))
    tokens, d, f, h, k = 32, MODEL.hidden, MODEL.ffn, MODEL.heads, MODEL.kv_width
    e = {"bf16": 2, "fp32": 4, "fp64": 8}[precision]
    a = max(e, 4)
    none = tokens * (e * (6 * d + 2 * k + 4 * f) + a * (h + 2))
    expected = {"none": none, "selective": none - tokens * a * h, "full": tokens * e * d}[recompute]
    assert sum(saved_items(plan, Sizes.of(plan), "blocks.1").values()) == expected


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_unfused_attention_keeps_its_probabilities(tp: int) -> None:
    plans = [unit_plan(MODEL, Layout.parse(f"tp={tp},attention={kind}"), Workload(16, 1)) for kind in ("math", "sdpa")]
    math, sdpa = (sum(made_items(plan, Sizes.of(plan), "blocks.0").values()) for plan in plans)
    heads = MODEL.heads // tp
    assert math - sdpa == 2 * heads * 16 * 16 - 4 * heads * 16


def test_sequence_parallelism_divides_everything_by_tp() -> None:
    """Korthikanti et al.: with sp nothing is left whole. Gathered inputs are gathered again, so not saved either."""
    whole = unit_plan(MODEL, Layout(), Workload(16, 1))
    split = unit_plan(MODEL, Layout.parse("tp=2,sp"), Workload(16, 1))
    a, b = (sum(made_items(plan, Sizes.of(plan), "blocks.0").values()) for plan in (whole, split))
    assert a == 2 * b


def test_a_mask_is_saved_once_whatever_the_number_of_blocks() -> None:
    packed, plain = (unit_plan(MODEL, Layout(), Workload(16, 1, docs)) for docs in (True, False))
    assert saved_bytes(packed) - saved_bytes(plain) == 16 * 16 * 2


# -- long pipelines: their steady state once


def long_cases(generator: random.Random, count: int) -> Iterator[tuple[UnitPlan, int]]:
    """(plan, place) of as many pipelines with up to a hundred micro-batches, on a place drawn at random."""
    points = cases("pipelines")
    while count:
        point = generator.choice(points)
        layout, workload, model = point.layout, point.case.workload, point.case.model
        batch = layout.dp * layout.micro * generator.randrange(20, 100)
        if layout.schedule == "interleaved":
            batch = batch // (layout.dp * layout.micro * layout.pp) * layout.dp * layout.micro * layout.pp
        place = generator.randrange(layout.pp)
        rank = Mesh.of(layout, model).rank(pp=place)
        backend: Backend = generator.choice(("shared", "gloo", "nccl"))
        yield unit_plan(model, layout, replace(workload, batch=batch), rank=rank, backend=backend), place
        count -= 1


class _Forgetful(dict[Any, Any]):
    """Keeps nothing, so that every action is followed anew."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def test_the_steady_state_counts_what_every_action_counts() -> None:
    """Bytes, messages and gathers of a step from short steps are those of all its actions, one by one, each followed on
    its own stage."""
    left_out = set()
    for plan, place in long_cases(random.Random(seed()), 1500 if EVERYTHING else 40):
        name = f"{plan.layout} x{plan.micro_batches}, place {place}, {plan.backend}"
        one_by_one = _Rank(plan)
        one_by_one.outcomes = _Forgetful()
        one_by_one.like = {stage: stage for stage in plan.stages}
        one_by_one.bytes_of = {stage: StageBytes.of(plan, Sizes.of(plan), stage) for stage in plan.stages}
        for action in plan.pipeline.actions:
            one_by_one.do(action)
        assert held_by_actions(plan) == one_by_one.end(), name
        assert count_step(plan, ledger._pipeline) == ledger._pipeline(plan), name
        assert gather_counts(plan) == gathers._gathers_one_by_one(plan), name
        left_out.add((plan.layout.schedule, plan.short.micro_batches < plan.micro_batches))
    assert sum(short for _, short in left_out) >= 7


@pytest.mark.parametrize(
    ("layout", "sends"),
    [("pp=8", 1), ("pp=8,schedule=gpipe", 1), ("pp=4,virtual=2,schedule=breadth-first,zero=3,dp=2", 3)],
)
def test_a_million_micro_batches_are_not_gone_through_one_by_one(
    layout: str, sends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def training(split: Layout, tied: bool, count: int, early: bool) -> object:
        made.append(count)
        return build(split, tied, count, early)

    build = pipeline.training
    monkeypatch.setattr(pipeline, "training", training)
    split, cluster = Layout.parse(layout), Cluster.parse("8xH100")
    report = estimate(get("llama-3-8b"), split, Workload(4096, 1_000_000 * split.dp), cluster)
    sent = sum(row.count for row in report.roles[0].ledger if row.op == "send")
    assert sent == 1_000_000 * sends
    assert max(made) < 100


@pytest.mark.parametrize("words", ["dp=8,zero=3", "dp=2,pp=4", "dp=4,pp=2,offload_activations=cpu", "dp=8,sync=ps"])
def test_a_plan_is_built_once_for_each_role(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And handed down: to memory, communication and time, with the shorter steps from which longer ones follow."""
    built: Counter[tuple[int, ...]] = Counter()
    init = UnitPlan.__init__

    def counted(self: UnitPlan, *args: Any, **given: Any) -> None:
        init(self, *args, **given)
        built[self.pp_rank, self.tp_rank, self.workload.batch] += 1

    monkeypatch.setattr(UnitPlan, "__init__", counted)
    estimate("llama-3-8b", words, "8xH100", seq=4096, batch=64)
    assert {*built.values()} == {1} and len({place[:2] for place in built}) == Layout.parse(words).pp, built
