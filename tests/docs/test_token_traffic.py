"""What a token moves: against the ledger of a forward pass, and against the schedules' bytes on the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quoted.tokens import block_bytes, boundary_bytes, read_seconds, received_bytes, stored_bytes, summed_bytes
from shardwise.cluster import Device
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model.catalog import get
from shardwise.planner.strategies import traffic_ratio
from shardwise.predict.traffic.ledger import predict_ledger
from shardwise.schedule import build
from shardwise.schedule.network import Network
from shardwise.schedule.price import price


def test_sums_are_those_of_the_ledger():
    model = get("tiny-llama")
    plan = unit_plan(model, Layout.parse("tp=2"), Workload(seq=64, batch=1))
    rows = [r for r in predict_ledger(plan) if r.phase == "forward" and r.axes == "tp" and r.unit.startswith("blocks.")]
    assert sum(row.payload_bytes for row in rows) == summed_bytes(model, 64)


@given(st.integers(2, 16), st.sampled_from(["llama-3-8b", "gpt2"]))
def test_the_ratio_is_that_of_bytes_on_the_wire(ranks, name):
    model, network = get(name), Network.flat(ranks, 0.0, 1.0)
    weights = stored_bytes(1e9)
    gathered = price(build("all-gather", "ring", ranks), network, weights).bytes_sent
    summed = price(build("all-reduce", "ring", ranks), network, summed_bytes(model)).bytes_sent
    assert gathered == pytest.approx(received_bytes(weights, ranks), abs=1)
    assert gathered / summed == pytest.approx(traffic_ratio(1e9, model), rel=1e-4)


def test_bytes_and_bounds():
    assert stored_bytes(2e9, "int4") == 1e9 and boundary_bytes(3, 5, 4) == 60
    assert block_bytes(get("llama-3-8b"), "float32") == 2 * block_bytes(get("llama-3-8b"))
    device = Device("D", "cuda", None, 1e12)
    assert read_seconds(2e12, device, 4) == 0.5


def test_what_is_not_known_is_one_line():
    with pytest.raises(UserError, match="no data type 'int3'"):
        stored_bytes(1.0, "int3")
    with pytest.raises(UserError, match="bandwidth not known"):
        read_seconds(1.0, Device("D", "cuda", None, None))
