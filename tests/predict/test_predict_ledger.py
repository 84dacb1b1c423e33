"""The predicted ledger against the volumes that the papers state."""

from collections import Counter

import pytest
from hypothesis import given

from harness.strategies import split_models
from shardwise.layout import Layout, Mesh, UnitPlan, Workload, unit_plan
from shardwise.layout.axes import named
from shardwise.model import ModelConfig
from shardwise.model.parameters import count
from shardwise.predict.traffic.ledger import predict_ledger
from shardwise.report.step_report import LedgerRow

MODEL = ModelConfig("m", vocab=64, hidden=32, layers=6, heads=4, kv_heads=2, ffn=48, max_positions=64)
WORKLOAD = Workload(16, 4)


def rows(text: str, workload: Workload = WORKLOAD, model: ModelConfig = MODEL) -> tuple[LedgerRow, ...]:
    return predict_ledger(unit_plan(model, Layout.parse(text), workload))


def volume(ledger: tuple[LedgerRow, ...], op: str) -> int:
    """Elements of all collectives `op` that carry weights or their gradients."""
    return sum(row.elements * row.count for row in ledger if row.op == op and row.unit in UNITS)


UNITS = {"embedding", "head", "tied", *(f"blocks.{i}" for i in range(MODEL.layers))}


def test_data_parallel_reduces_every_gradient_once() -> None:
    assert volume(rows("dp=4"), "all_reduce") == count(MODEL)


def test_stage_1_moves_as_much_as_data_parallel() -> None:
    ledger = rows("dp=4,zero=1")
    assert volume(ledger, "reduce_scatter") == volume(ledger, "all_gather_into") == count(MODEL)


def test_stage_3_moves_at_most_half_as_much_again() -> None:
    """3P against 2P elements (ZeRO), less the units that stay gathered between forward and backward."""
    ledger = rows("dp=4,zero=3")
    gathered = volume(ledger, "all_gather_into")
    assert volume(ledger, "reduce_scatter") == count(MODEL)
    assert count(MODEL) < gathered < 2 * count(MODEL)
    forward = {row.unit for row in ledger if row.phase == "forward"}
    backward = {row.unit for row in ledger if row.phase == "backward" and row.op == "all_gather_into"}
    assert forward == UNITS - {"tied"}
    assert backward == {f"blocks.{i}" for i in range(MODEL.layers - 1)}


@pytest.mark.parametrize("k", [1, 2, 5])
def test_accumulation_multiplies_what_stages_2_and_3_reduce(k: int) -> None:
    workload = Workload(16, 2 * k)
    for zero, times in ((1, 1), (2, k), (3, k)):
        assert volume(rows(f"dp=2,zero={zero}", workload), "reduce_scatter") == times * count(MODEL)
    assert volume(rows("dp=2", workload), "all_reduce") == count(MODEL)


@pytest.mark.parametrize("sp", [False, True])
def test_tensor_parallel_sums_four_times_a_block(sp: bool) -> None:
    """Two sums forward, two backward (Shoeybi et al.); under sp each is a reduce-scatter and an all-gather."""
    ledger = [row for row in rows("tp=2,sp" if sp else "tp=2") if row.unit == "blocks.2" and row.elements == 16 * 32]
    found = {(row.phase, row.op): row.count for row in ledger}
    k = 4
    if sp:
        # One all-gather more in each half's backward: the input that was not saved whole.
        assert found == {
            ("forward", "all_gather_into"): 2 * k, ("forward", "reduce_scatter"): 2 * k,
            ("backward", "all_gather_into"): 4 * k, ("backward", "reduce_scatter"): 2 * k,
        }  # fmt: skip
    else:
        assert found == {("forward", "all_reduce"): 2 * k, ("backward", "all_reduce"): 2 * k}


def test_recompute_repeats_the_forward_sums_in_backward() -> None:
    def backward_sums(recompute: str) -> list[int]:
        ledger = rows(f"tp=2,recompute={recompute}", Workload(16, 1))
        return [
            row.count
            for i in range(MODEL.layers)
            for row in ledger
            if row.unit == f"blocks.{i}" and row.phase == "backward" and row.op == "all_reduce"
        ]

    assert backward_sums("none") == backward_sums("selective") == [2] * 6
    assert backward_sums("full") == [4] * 6
    assert backward_sums("input") == [2 + 2 * (6 - i) for i in range(6)]


def test_hybrid_sharding_sums_replicas_once_a_step() -> None:
    ledger = rows("dp=4,zero=2,shard=2")
    assert {row.axes for row in ledger if row.op == "reduce_scatter"} == {"shard"}
    replicate = [row for row in ledger if row.axes == "replicate"]
    assert sum(row.elements for row in replicate) == count(MODEL) / 2
    assert {(row.op, row.count, row.dtype) for row in replicate} == {("all_reduce", 1, "bfloat16")}


def test_one_rank_is_silent() -> None:
    assert rows("dp=1") == ()


@given(split_models())
def test_rows_are_sorted_distinct_and_span_more_than_one_rank(split: tuple[ModelConfig, Layout, Workload]) -> None:
    model, layout, _ = split
    ledger = predict_ledger(UnitPlan(*split, 0, "gloo"))
    keys = Counter((r.phase, r.op, r.axes, r.unit, r.dtype, r.elements) for r in ledger)
    assert list(ledger) == sorted(ledger) and set(keys.values()) <= {1}
    mesh = Mesh.of(layout, model)
    for row in ledger:
        assert row.count > 0 and row.elements > 0 and mesh.size(named(row.axes)) > 1
    assert (ledger == ()) == (layout.ranks == 1)


@given(split_models())
def test_all_ranks_of_a_group_predict_the_same_collectives(split: tuple[ModelConfig, Layout, Workload]) -> None:
    model, layout, workload = split
    ledgers = {predict_ledger(unit_plan(model, layout, workload, rank=r)) for r in range(layout.ranks)}
    assert len(ledgers) == 1
