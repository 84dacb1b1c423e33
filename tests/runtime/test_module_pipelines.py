"""Pipelines of a user's module: `verify` and training under the schedules of the catalog's models."""

from itertools import product

import pytest
from torch import nn

from harness.cases import from_table, table
from harness.module_jobs import OwnTraining, trained, verdict
from harness.own_modules import (
    GPT2_PARTS,
    GPT2_PLAN,
    OWN,
    PARTS,
    PIPED,
    PastStages,
    own_batch,
    token_example,
)
from harness.pool import run_ranks
from harness.today import some_of
from shardwise import Layout, UserError
from shardwise.runtime.module.chain import Chain, find_chain
from shardwise.runtime.module.describe import describe, find_blocks
from shardwise.runtime.module.verify import TOLERANCE

LAYOUTS = table(__file__, "LAYOUTS")


@pytest.mark.parametrize(("family", "layout"), some_of(product(PIPED, LAYOUTS), 5, "pipelines of a user's module"))
def test_transformers_classes_are_split_right(family, layout):
    tolerance = 1e-6 if family in ("mixtral", "deepseek") else TOLERANCE
    plan, parts = (GPT2_PLAN, GPT2_PARTS) if family.startswith("gpt2") else (None, None)
    result = verdict(PIPED[family], layout, token_example(), plan, parts, tolerance)
    assert result, str(result)
    assert result.parameters >= 15


TRAINED = table(__file__, "TRAINED")


def test_trap_36_stages_get_all_gradients():
    """Tokens differ over micro-batches."""
    trained(OwnTraining("plain", "pp=2,dp=2", 2))
    trained(OwnTraining("states", "pp=2", 4))


@pytest.mark.parametrize("layout", ["pp=2", "pp=2,dp=2,zero=3"])
def test_trap_36_tied_tables_of_both_ends_are_one(layout):
    result = verdict(PIPED["gpt2"], layout, token_example(), GPT2_PLAN, GPT2_PARTS)
    assert result, str(result)


@pytest.mark.parametrize(("name", "layout", "accumulate"), some_of(TRAINED, 7, "trained pipelines"))
def test_training_is_that_of_one_device(name, layout, accumulate):
    """Three steps with clipping; tokens differ over ranks and micro-batches."""
    trained(OwnTraining(name, layout, accumulate))


def test_a_connection_past_a_stage_is_noticed():
    """It would be wrong without a word if what is skipped were zero, or the tensor that travels."""
    result = verdict(PastStages, "pp=2", (own_batch("plain", 4, 0)[0],), parts=PARTS["plain"])
    assert not result and result.module == "head"
    for message in run_ranks("harness.module_jobs:conditioned", 2, "pp=2"):
        assert "blocks.2 takes a second tensor from a part before the blocks" in message


def test_the_ledger_has_a_message_per_micro_batch_and_way():
    outcomes = trained(OwnTraining("plain", "pp=2", 4))
    for outcome in outcomes:
        messages = {op: sum(row.count for row in outcome.ledger if row.op == op) for op in ("send", "recv")}
        assert messages == {"send": 4, "recv": 4}


@from_table
def test_a_bad_list_of_parts_is_one_line(parts, message):
    module = OWN["plain"]()
    with pytest.raises(UserError, match=message) as caught:
        describe(module, Layout(pp=2), None, [], find_chain(module, parts, find_blocks(module, None)))
    assert "\n" not in str(caught.value)


def test_parts_are_paths_or_modules():
    module = OWN["plain"]()
    expected = Chain(("enter",), tuple(f"blocks.{n}" for n in range(4)), ("head",))
    blocks = find_blocks(module, None)
    for parts in (
        ["enter", "blocks.*", "head"],
        ["enter", "blocks", "head"],
        [module.enter, module.blocks, module.head],
    ):
        assert find_chain(module, parts, blocks) == expected
    rows = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert find_chain(rows, ["*"], []) == Chain((), ("0", "2"), ())
