"""Experts of a user's module: `verify` under every layout, with experts whole, split by width and over ranks."""

from functools import partial
from itertools import product

import pytest

from harness.cases import from_table, table
from harness.module_jobs import OwnTraining, trained, verdict
from harness.own_modules import MIXTURES, OWN, exact, token_example
from harness.pool import run_ranks
from harness.today import some_of
from shardwise import Layout, UserError
from shardwise.runtime.module.describe import describe

WHOLE = table(__file__, "WHOLE")
SPREAD = table(__file__, "SPREAD")


@pytest.mark.parametrize(
    ("family", "layout"), some_of(product(MIXTURES, WHOLE + SPREAD), 6, "mixtures of a user's module")
)
def test_mixtures_are_split_right(family, layout):
    result = verdict(partial(exact, family), layout, token_example(), tolerance=1e-12)
    assert result, str(result)
    assert result.modules >= 20 and result.parameters >= 18


@pytest.mark.parametrize("layout", ["tp=2", "dp=2,tp=2,ep=2,etp=2,zero=3", "dp=4,ep=2"])
def test_trap_36_experts_and_their_router_get_all_gradients(layout):
    trained(OwnTraining("routed", layout))


@pytest.mark.parametrize("layout", some_of(SPREAD, 5, "trained experts"))
def test_training_is_that_of_one_device(layout):
    """Three steps with clipping: losses, norms and parameters."""
    trained(OwnTraining("routed", layout))


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm"])
def test_other_implementations_of_experts_compute_the_same(name):
    for error, norm, expected in run_ranks("harness.module_jobs:implemented", 2, name):
        assert error < 1e-5 and norm == pytest.approx(expected, rel=1e-4)


def test_the_ledger_has_the_way_of_tokens():
    """Per block the numbers of rows, the way to the experts and back, and that of the gradients."""
    for outcome in trained(OwnTraining("routed", "dp=2,ep=2")):
        for block in ("blocks.0", "blocks.1"):
            rows = [row for row in outcome.ledger if (row.op, row.unit) == ("all_to_all", block)]
            assert sum(row.count for row in rows) == 5
            assert {row.axes for row in rows} == {"ep"}


def test_micro_batches_are_one_batch():
    trained(OwnTraining("routed", "dp=2,ep=2,zero=2", accumulate=2))


@from_table
def test_a_bad_plan_for_experts_is_one_line(plan, layout, message):
    with pytest.raises(UserError, match=message) as caught:
        describe(OWN["routed"](), Layout.parse(layout), plan, [])
    assert "\n" not in str(caught.value)
