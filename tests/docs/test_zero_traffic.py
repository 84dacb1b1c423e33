"""ZeRO's volumes: against the ledger where the rule holds exactly, and ZeRO++'s parts."""

import pytest

from quoted.zero import elements_moved, zeropp_across_nodes
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model.catalog import get
from shardwise.model.parameters import count
from shardwise.predict.traffic.ledger import predict_ledger


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_ledger_moves_as_much_but_for_padding(stage, micro_batches):
    model = get("tiny-llama")
    plan = unit_plan(model, Layout.parse(f"dp=4,zero={stage}"), Workload(seq=64, batch=4 * micro_batches))
    rows = [row for row in predict_ledger(plan) if row.elements > 1]
    moved = sum(row.elements * row.count * (2 if row.op == "all_reduce" else 1) for row in rows)
    assert moved == pytest.approx(elements_moved(count(model), stage, micro_batches), rel=1e-3)


def test_stage_3_gathers_twice_a_micro_batch():
    assert elements_moved(1.0, 3) == 3 and elements_moved(1.0, 3, 4) == 12


def test_zeropp_is_the_sum_of_its_parts():
    assert zeropp_across_nodes(1.0, False, False, False) == elements_moved(1.0, 3)
    assert zeropp_across_nodes(1.0, True, False, False) == 2.0
    assert zeropp_across_nodes(1.0) == 0.75


def test_nonsense_is_refused():
    for stage, micro_batches in ((4, 1), (-1, 1), (1, 0)):
        with pytest.raises(UserError):
            elements_moved(7e9, stage, micro_batches)
