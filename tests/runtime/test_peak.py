"""Predicted bytes of random pairs of a model and a layout, compared with a dry run's."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from harness import summary
from harness.cases import table
from harness.checks import assert_ledger, assert_memory, train
from harness.pairs import EXACT, featured, pair
from harness.pool import run_ranks
from harness.reference import Case, Outcome
from harness.space import MODELS, Point, point, sample
from harness.today import seed, some_of
from harness.witness import realised
from shardwise.decoder import modules
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.predict.memory.step import predict_bytes
from shardwise.runtime.dryrun import _observe

SEED, PAIRS = 7, 500
"""Of `benchmarks/peak_fuzz.py --seed 7 --pairs 500`, whose result the README states."""
PER_DAY = 3
BOUND = 0.05
"""Of all pairs, those with more features too."""
OFFLOADED = table(__file__, "OFFLOADED")


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeTensorMode]:
    """The decoder keeps scalars between calls: tests after these need real ones."""
    modules._scalar.cache_clear()
    yield FakeTensorMode()
    modules._scalar.cache_clear()


def test_tables_go_with_the_last_stage_that_has_blocks(fake: FakeTensorMode) -> None:
    """A V schedule whose first stage is the embedding alone, whose backward comes last."""
    plan, rank = pair(SEED, 165)
    assert plan.stages == {0: ["embedding"], 7: ["blocks.10", "blocks.11", "head"]}
    assert predict_bytes(plan).total == pytest.approx(_observe(plan, rank, fake).bytes.total, rel=0.005)


def test_one_chunk_of_probabilities_at_a_time(fake: FakeTensorMode) -> None:
    """More logits than the 2^18 that the loss processes at once."""
    drawn = (pair(SEED, index) for index in range(PAIRS))
    plan, rank = next((plan, rank) for plan, rank in drawn if plan.tokens * plan.model.vocab > 1 << 18)
    assert predict_bytes(plan).total == pytest.approx(_observe(plan, rank, fake).bytes.total, rel=0.005)


@pytest.mark.parametrize("layout", some_of(OFFLOADED, 1, "offloaded"))
def test_offloaded_activations_in_a_dry_run(layout: str, fake: FakeTensorMode) -> None:
    plan = unit_plan(get("tiny-llama"), Layout.parse(layout), Workload(seq=64, batch=8), rank=0, backend="shared")
    observed, predicted = _observe(plan, 0, fake), predict_bytes(plan)
    assert [getattr(predicted, name) for name in EXACT] == [getattr(observed.bytes, name) for name in EXACT]
    assert observed.host.saved > 0 and predicted.total == pytest.approx(observed.bytes.total, rel=0.005)


def test_the_input_of_a_stage_stays_where_the_block_that_saves_it_is_offloaded(fake: FakeTensorMode) -> None:
    plan, rank = featured(SEED, 31)
    assert plan.layout.offload_activations == "cpu" and plan.layout.pp == 4
    assert predict_bytes(plan).total == pytest.approx(_observe(plan, rank, fake).bytes.total, rel=0.03)


FURTHEST = {
    20: "scores with a cap, over cut sequences",
    94: "scores of grouped heads, over cut sequences",
    96: "packed gradients of more than one chunk",
    107: "scores over gathered keys",
    166: "rows of experts that are kept for their weights",
    337: "a mask of all tokens that blocks share, beside offloaded activations",
    409: "a scaled table alone on a stage",
}
"""Pairs with features that were 3% to 23% off, and what was counted wrong."""


@pytest.mark.parametrize("index", some_of(FURTHEST, 2, "peaks furthest off"), ids=FURTHEST.get)
def test_pairs_that_were_furthest_off(index: int, fake: FakeTensorMode) -> None:
    plan, rank = featured(SEED, index)
    observed, predicted = _observe(plan, rank, fake).bytes, predict_bytes(plan)
    assert [getattr(predicted, name) for name in EXACT] == [getattr(observed, name) for name in EXACT]
    assert predicted.total == pytest.approx(observed.total, rel=0.01)


UNEXPLAINED = {126: "comm"}
"""Class that is not equal, though by 8 KiB of 1.4 MB, under a dualpipe-v schedule over gloo."""


@pytest.mark.parametrize("index", some_of(range(PAIRS), 1, "peaks with features"))
def test_the_prediction_of_a_random_pair_with_features(index: int, fake: FakeTensorMode) -> None:
    plan, rank = featured(SEED, index)
    observed, predicted = _observe(plan, rank, fake).bytes, predict_bytes(plan)
    for name in EXACT:
        if name == UNEXPLAINED.get(index):
            assert getattr(predicted, name) == pytest.approx(getattr(observed, name), rel=0.01)
            continue
        assert getattr(predicted, name) == getattr(observed, name), f"{name}: {plan.model.name} {plan.layout}"
    assert predicted.total == pytest.approx(observed.total, rel=BOUND), f"{plan.model.name} {plan.layout}"


@pytest.mark.parametrize("index", some_of(range(PAIRS), PER_DAY, "peaks"))
def test_the_prediction_of_a_random_pair(index: int, fake: FakeTensorMode) -> None:
    plan, rank = pair(SEED, index)
    observed, predicted = _observe(plan, rank, fake).bytes, predict_bytes(plan)
    for name in EXACT:
        assert getattr(predicted, name) == getattr(observed, name), f"{name}: {plan.model.name} {plan.layout}"
    assert predicted.total == pytest.approx(observed.total, rel=BOUND), f"{plan.model.name} {plan.layout}"


# -- Memory of activations that matter: longer sequences, several to a micro-batch, every recompute mode


SEQ = 128
LLAMA = MODELS["llama"].replace(name="llama", hidden=64, head_dim=16, ffn=176, vocab=211, max_positions=256)
GPT = MODELS["gpt2"].replace(name="gpt2", hidden=64, head_dim=16, ffn=256, vocab=211, max_positions=256)
QWEN3 = MODELS["qwen3"].replace(name="qwen3", hidden=64, head_dim=16, ffn=176, vocab=211, max_positions=256)
OLMO2 = MODELS["olmo2"].replace(hidden=64, head_dim=16, ffn=176, vocab=211, max_positions=256)
GEMMA2 = MODELS["gemma2"].replace(hidden=64, head_dim=16, ffn=176, vocab=211, max_positions=256, window=50)
GRIDS = (
    (OLMO2, "tp=2,micro=4,precision=fp32", 4),
    (GEMMA2, "dp=2,zero=3,micro=4", 8),
    (LLAMA, "tp=2,sp,micro=4", 4),
    (GPT, "dp=2,zero=3,micro=4", 8),
    (QWEN3, "tp=2,micro=8", 8),
    (LLAMA, "dp=2,zero=1,micro=4,precision=fp64", 16),
    (GPT, "tp=2,sp,micro=6,precision=fp32", 6),
    (LLAMA, "dp=2,tp=2,zero=2,sp,micro=4,precision=fp32", 8),
)
RECOMPUTE = ("none", "selective", "full", "input")
KINDS = tuple(product(RECOMPUTE, ("sdpa", "math"), (False, True)))
LAYOUTS = [(*GRIDS[i % len(GRIDS)], *kind) for i, kind in enumerate(KINDS)]
LAYOUTS += [(*GRIDS[(i + 3) % len(GRIDS)], *kind) for i, kind in enumerate(KINDS) if i % 2]


def build(
    model: ModelConfig, text: str, batch: int, recompute: str, attention: str, documents: bool
) -> tuple[Case, Layout]:
    layout = Layout.parse(f"{text},recompute={recompute},attention={attention}")
    return Case(model, Workload(SEQ, batch, documents), layout.precision, attention), layout


def name(value: object) -> str:
    return value.name if isinstance(value, ModelConfig) else {True: "documents", False: "plain"}.get(value, str(value))  # type: ignore[call-overload]


@pytest.mark.parametrize(("model", "text", "batch", "recompute", "attention", "documents"), LAYOUTS, ids=name)
def test_memory(model: ModelConfig, text: str, batch: int, recompute: str, attention: str, documents: bool) -> None:
    case, layout = build(model, text, batch, recompute, attention, documents)
    ranks = train(replace(case, steps=2), layout, against=blank(model))
    assert_ledger(case, layout, ranks)
    assert_memory(case, layout, ranks)


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_what_recompute_saves_and_costs(attention: str, record_property: Callable[[str, Any], None]) -> None:
    saved = {}
    for recompute in RECOMPUTE:
        case, layout = build(LLAMA, "dp=2,zero=2,micro=8,precision=fp32", 16, recompute, attention, False)
        ranks = train(replace(case, steps=5), layout, against=blank(LLAMA))
        held, predicted = ranks[0].role.bytes, predict_bytes(unit_plan(LLAMA, layout, case.workload))
        saved[recompute] = held.saved
        summary.add(
            record_property,
            "recompute: memory and time of a step (2 blocks, 1,024 tokens, 2 ranks)",
            ("attention", "recompute", "saved", "peak", "predicted peak", "seconds a step"),
            (attention, recompute, f"{held.saved:,}", f"{held.total:,}", f"{predicted.total:,}",
             f"{max(r.seconds for r in ranks):.4f}"),
        )  # fmt: skip
    # Fused attention of short sequences saves nothing that the rest of the block does not.
    assert saved["none"] > saved["selective"] if attention == "math" else saved["none"] == saved["selective"]
    assert saved["selective"] > saved["full"] > saved["input"]


def blank(model: ModelConfig) -> Outcome:
    """No reference: distances are to zero, and nobody reads them."""
    import torch

    from shardwise.model.parameters import parameters

    zeros = {p.name: torch.zeros(p.shape, dtype=torch.float64) for p in parameters(model)}
    return Outcome([], [], zeros, zeros)


# -- The runtime's own ledger against an independent witness of what passes through the process groups


POINTS = (
    point(model="qwen3", dp=2, tp=2, zero=3, sp=True, accumulate=2, recompute="full"),
    point(model="mqa", dp=4, zero=2, shard=2, accumulate=3, recompute="input"),
    point(model="neox", dp=2, tp=2, zero=1, accumulate=2),
    point(model="gpt2", dp=3, accumulate=2, recompute="full"),
    point(model="llama", tp=4, documents=True, attention="math", recompute="selective"),
    *sample(seed(), count=7, most_ranks=4),
)


@pytest.mark.parametrize("point", [p for p in POINTS if p.layout.ranks > 1], ids=lambda p: p.id)
def test_the_ledger_is_what_passes(point: Point) -> None:
    for rank, (ledger, seen) in enumerate(
        run_ranks("harness.witness:watch", point.layout.ranks, (point.case, point.layout, False))
    ):
        assert sum(seen.values()) > 0
        assert realised(point.case, point.layout, rank, ledger) == seen


def test_the_sample_of_witnessed_layouts_is_broad() -> None:
    points = [p for p in POINTS if p.layout.ranks > 1]
    assert len(points) >= 8
    assert {p.layout.stage for p in points} == {0, 1, 2, 3}
    assert any(p.layout.tp > 1 and not p.layout.sp for p in points)
    assert any(p.layout.sp for p in points)
    assert any(p.layout.stage and p.layout.replicate_ranks > 1 for p in points)


def test_a_collective_that_is_not_in_the_ledger_is_noticed() -> None:
    smuggled = point(model="llama", dp=2, zero=2)
    for rank, (ledger, seen) in enumerate(
        run_ranks("harness.witness:watch", 2, (smuggled.case, smuggled.layout, True))
    ):
        extra = seen - realised(smuggled.case, smuggled.layout, rank, ledger)
        assert extra == {("allreduce_", (0, 1), 7, "float32"): 1}
