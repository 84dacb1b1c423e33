"""Predicted bytes of random pairs of a model and a layout, compared with a dry run's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.pairs import EXACT, pair
from harness.today import some_of
from shardwise.decoder import modules
from shardwise.predict.memory.step import predict_bytes
from shardwise.runtime.dryrun import _observe

SEED, PAIRS = 7, 500
"""Of `benchmarks/peak_fuzz.py --seed 7 --pairs 500`, whose result the README states."""
PER_DAY = 3
BOUND = 0.05


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


@pytest.mark.parametrize("index", some_of(range(PAIRS), PER_DAY, "peaks"))
def test_the_prediction_of_a_random_pair(index: int, fake: FakeTensorMode) -> None:
    plan, rank = pair(SEED, index)
    observed, predicted = _observe(plan, rank, fake).bytes, predict_bytes(plan)
    for name in EXACT:
        assert getattr(predicted, name) == getattr(observed, name), f"{name}: {plan.model.name} {plan.layout}"
    assert predicted.total == pytest.approx(observed.total, rel=BOUND), f"{plan.model.name} {plan.layout}"
