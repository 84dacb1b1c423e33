"""Predicted bytes of random pairs of a model and a layout, compared with a dry run's."""

from collections.abc import Iterator

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.cases import table
from harness.pairs import EXACT, featured, pair
from harness.today import some_of
from shardwise.decoder import modules
from shardwise.layout import Layout, Workload, unit_plan
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
